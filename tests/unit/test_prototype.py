"""Prototypes read from C text in its three spellings, and bound to operators."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kagent_core.capture.schemas import resolve_overload
from kagent_core.errors import PackingError, SignatureError
from kagent_core.extract.binding import bind_prototype
from kagent_core.prototype import parse_prototype, prototype_refusal
from kagent_core.prototype.declaration import kernel_declarations, type_definitions
from kagent_core.specs import Access, KernelDescriptor, Parameter

from .builders import call, tensor


def declared(text, name=None, **options):
    """Name and type of each parameter."""
    return [(parameter.name, parameter.type) for parameter in parse_prototype(text, name, **options)]


def refusal(text, name=None, **options):
    with pytest.raises(PackingError) as caught:
        parse_prototype(text, name, **options)
    return caught.value


ADD = [
    ("self", "const float*"),
    ("other", "const float*"),
    ("out", "float*"),
    ("n", "int64_t"),
    ("alpha", "float"),
]


@pytest.mark.parametrize(
    "text",
    [
        """
        __kernel __attribute__((reqd_work_group_size(256, 1, 1)))
        void add(__global const float* restrict self, global float const *other, __global float *out,
                 const int64_t n, float alpha) { out[get_global_id(0)] = 0; }
        """,
        """
        #include <cstdint>
        extern "C" __global__ void __launch_bounds__(256, (2 + 2)) add(const float* __restrict__ self,
            const float *const __restrict__ other, float* __restrict__ out, std::int64_t n, float alpha);
        """,
        "void add(const float *restrict self, const float other[], float out[restrict], int64_t n, float alpha)",
        """
        extern "C" __declspec(dllexport) void add(float const* self, const volatile float* other, float* out,
            int64_t n, // the number
            /* of, elements */ register float alpha);
        """,
    ],
)
def test_three_spellings_of_one_prototype(text):
    parsed = [(name, spelling.removeprefix("std::")) for name, spelling in declared(text, derived={"n": "out.numel()"})]
    assert parsed == ADD


def test_access_and_derivation():
    text = "void f(const float* self, float* out, const float* bias, long n)"
    assert parse_prototype(text, derived={"n": "out.numel()"}, optional=["bias"], ignore=["dim"], only={"p": 2.0}) == (
        Parameter("self", "const float*", Access.IN),
        Parameter("out", "float*"),
        Parameter("bias", "const float*", Access.IN, optional=True),
        Parameter("n", "long", derived="out.numel()"),
        Parameter("dim", "void"),
        Parameter("p", "void", derived="2.0"),
    )


SOURCE = """
#define T(x) void x(int a)
typedef float scalar_t;
typedef unsigned long long big;
using index_t = long;
typedef struct { int64_t data[8]; } dims;
struct pads { int data[4]; };
typedef struct tagged { unsigned char bytes [2]; } tagged_t;
typedef loop loop;

static inline void helper(float x) {}
__device__ void device_helper(float x) {}
/* __global__ void gone(int a); */
extern "C" {
__global__ void first(const scalar_t* self, index_t n, big m);
__global__ void second(dims self_sizes, struct pads p, const tagged_t t, c10::complex< float > z,
                       cuda::std::complex<double>* out) {
  if (n) { void (*f)(int); }
}
}
"""


def test_definitions_of_the_source_are_known():
    assert declared(SOURCE, "first") == [("self", "const float*"), ("n", "long"), ("m", "unsigned long long")]
    assert declared(SOURCE, "second") == [
        ("self_sizes", "int64_t[8]"),
        ("p", "int[4]"),
        ("t", "unsigned char[2]"),
        ("z", "c10::complex<float>"),
        ("out", "cuda::std::complex<double>*"),
    ]


def test_types_can_be_given():
    text = "template <typename T> __global__ void f(const T* self, T* out, INDEX n)"
    assert declared(text, types={"T": "half", "INDEX": "int"}) == [
        ("self", "const half*"),
        ("out", "half*"),
        ("n", "int"),
    ]


def test_the_marked_function_is_the_kernel():
    text = "void helper(int a) {}  kernel void f(int dim) {}  static void other(int b) {}"
    assert declared(text) == [("dim", "int")]
    assert declared(text, "helper") == [("a", "int")]
    assert declared(text, "other") == [("b", "int")]


def test_a_declaration_and_its_definition_are_one_kernel():
    assert declared("void f(int dim); void f(int size) {}") == [("dim", "int")]


def test_text_and_comments_hold_no_kernel():
    text = """
    // kernel void a(int a) { "
    kernel void b(int dim) { print("kernel void c(/*", 'x', '"', '\\'', "\\" kernel void d(int d)"); }
    /* kernel void e(int e) " */
    """
    assert declared(text) == [("dim", "int")]


BASES = {
    "opencl": ["float", "double", "half", "uchar", "long", "ulong", "unsigned int", "float4"],
    "cuda": [
        "float",
        "__half",
        "__nv_bfloat16",
        "int64_t",
        "unsigned char",
        "long long",
        "thrust::complex<float>",
    ],
    "c": ["float", "double", "bool", "int8_t", "unsigned long long", "short", "size_t", "double _Complex"],
}
NOISE = st.sampled_from([" ", "  ", "\n    ", " /* a, b) */ ", " // and (this\n"])


@st.composite
def declarations(draw):
    """A kernel's text in one of the three languages, and its parameters."""
    language = draw(st.sampled_from(sorted(BASES)))
    expected, spelled = [], []
    for number in range(draw(st.integers(0, 6))):
        base, const, pointer = (
            draw(st.sampled_from(BASES[language])),
            draw(st.booleans()),
            draw(st.booleans()),
        )
        words = [*draw(st.permutations(["const", base] if const else [base]))]
        if language == "opencl" and pointer:
            words.insert(draw(st.integers(0, len(words))), draw(st.sampled_from(["__global", "global"])))
        if pointer:
            restrict = {"opencl": "restrict", "cuda": "__restrict__", "c": "restrict"}[language]
            words += ["*", *draw(st.lists(st.sampled_from(["const", restrict]), unique=True))]
        expected.append((f"p{number}", f"{'const ' if const and pointer else ''}{base}{'*' if pointer else ''}"))
        spelled.append(draw(NOISE).join([*words, f"p{number}"]))
    before, after = {
        "opencl": ("__kernel __attribute__((reqd_work_group_size(8, 8, 1))) void", ""),
        "cuda": ('#include <x>\nextern "C" __global__ void __launch_bounds__(64)', "{ x<<<1, 2>>>(3); }"),
        "c": ("void", ";"),
    }[language]
    return (
        f"{before} kern{draw(NOISE)}({draw(NOISE).join(f'{one},' for one in spelled).removesuffix(',')}) {after}",
        expected,
    )


@settings(max_examples=400, deadline=None)
@given(declarations())
def test_random_declarations(drawn):
    text, expected = drawn
    assert declared(text) == expected


@pytest.mark.parametrize("inside", ["", " ", "void"])
def test_no_parameters(inside):
    assert declared(f"void f({inside})") == []


@pytest.mark.parametrize("space", ["__constant", "constant", "__global const"])
def test_read_only_memory_is_const(space):
    assert parse_prototype(f"kernel void f({space} float* self)") == (Parameter("self", "const float*", Access.IN),)


@pytest.mark.parametrize(
    ("text", "name", "message", "hint"),
    [
        ("int f(int a);", None, "has 0 kernels, expected one", "a kernel is a function 'void name(...)'"),
        ("void f(int a); void g(int b);", None, "has 2 kernels, expected one", "say which: name='f' or 'g'"),
        ("kernel void f(int a);", "ff", "has no function 'void ff(...)'", "did you mean 'f'?"),
        ("kernel void f(int a);", "scale", "has no function 'void scale(...)'", "it has 'f'"),
        ("void f(int a", None, "a parenthesis is never closed: '(int a'", None),
        ("__attribute__((x) void f(int a)", None, "a parenthesis is never closed", None),
        (
            "void f(const float*)",
            None,
            "the parameter 'const float*', which has no name",
            "call it as ATen calls",
        ),
        ("void f(unsigned int)", None, "the parameter 'unsigned int', which has no name", None),
        ("void f(int a, )", None, "the parameter '', which has no name", None),
        ("void f(int a, float a)", None, "two parameters named 'a'", None),
        ("void f(flaot a)", None, "parameter 'a' of kernel 'f': 'flaot' is no type", "did you mean 'float'?"),
        ("void f(loop a) typedef loop loop;", None, "'loop' is no type", None),
        ("void f(float& a)", None, "'float &' is no type that a kernel parameter can have", None),
        ("void f(int a = 1)", None, "the parameter 'int a = 1', which has no name", None),
        ("void f(float* x a)", None, "'float * x' is no type", None),
        (
            "void f(float** self)",
            None,
            "parameter 'self' of kernel 'f': 'float**' is a pointer to pointers",
            None,
        ),
        ("void f(float* self[2])", None, "pointer to pointers", None),
        (
            "void f(__local float* tile)",
            None,
            "parameter 'tile' of kernel 'f': 'local float*' is local memory, and nothing says how many elements it has",
            "derived={'tile': '256'}",
        ),
        ("void f(__local float tile)", None, "'__local float' is local memory, which no argument is", "a pointer"),
        ("void f(local float** tile)", None, "'local float * *' is local memory, which no argument is", "a pointer"),
        ("void f(__shared__ void* tile)", None, "'local void*' is local memory of no element type", "local float*"),
    ],
)
def test_what_is_no_prototype(text, name, message, hint):
    error = refusal(text, name)
    assert message in error.message
    assert hint is None or hint in error.hint


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (
            {"derived": {"nn": "1"}},
            "'nn' is said to be derived, but kernel 'f' has no such parameter",
            "mean 'n'?",
        ),
        ({"derived": {"alpha": "1"}}, "'alpha' is said to be derived", "its parameters are 'n' or 'self'"),
        (
            {"optional": ["other"]},
            "'other' is said to be optional, but kernel 'f' has no such parameter",
            None,
        ),
        (
            {"optional": ["n"]},
            "parameter 'n' of kernel 'f' is said to be optional, but int is no pointer",
            "derived={'n'",
        ),
        ({"ignore": ["n"]}, "'n' is said to be ignored, but kernel 'f' has it", None),
        ({"only": {"self": 1}}, "'self' is said to be ignored, but kernel 'f' has it", None),
        (
            {"derived": {"n": "self.numle()"}},
            "parameter 'n' of kernel 'f': 'self.numle()' uses 'numle'",
            "'numel'",
        ),
    ],
)
def test_options_that_do_not_fit(options, message, hint):
    error = refusal("void f(const float* self, int n)", **options)
    assert message in error.message
    assert hint is None or hint in error.hint


# -- bound to an operator


def bind(signature, *parameters):
    return bind_prototype(KernelDescriptor(signature, "k", parameters=tuple(parameters)))


def accesses(bound):
    return [parameter.access for parameter in bound.parameters]


SELF, OTHER, OUT = (Parameter(name, spelling) for name, spelling in ADD[:3])


def test_const_is_read_and_the_rest_is_written():
    assert accesses(bind("aten::add.Tensor", SELF, OTHER, OUT)) == [Access.IN, Access.IN, Access.OUT]
    in_place = bind("aten::add_.Tensor", Parameter("self", "float*"), OTHER)
    assert accesses(in_place) == [Access.INOUT, Access.IN]
    overwritten = bind("aten::copy_", Parameter("self", "float*", Access.OUT), Parameter("src", "const float*"))
    assert accesses(overwritten) == [Access.OUT, Access.IN]
    into = bind("aten::add_.Tensor", SELF, OTHER, Parameter("out", "float*", Access.INOUT))
    assert accesses(into) == [Access.IN, Access.IN, Access.INOUT]


def test_an_access_that_is_given_counts():
    assert accesses(bind("aten::relu", Parameter("self", "float*", Access.IN), OUT)) == [
        Access.IN,
        Access.OUT,
    ]


def test_results_go_by_the_schemas_names_too():
    prototype = (SELF, Parameter("dim", "int"), Parameter("values", "float*"), Parameter("out1", "long*"))
    assert accesses(bind("aten::max.dim", *prototype)) == [Access.IN, None, Access.OUT, Access.OUT]


def test_an_overload_can_be_given():
    kernel = KernelDescriptor("somewhere::else", "k", parameters=(SELF, OUT))
    assert accesses(bind_prototype(kernel, overload=resolve_overload("aten::relu"))) == [
        Access.IN,
        Access.OUT,
    ]
    with pytest.raises(SignatureError):
        bind_prototype(kernel)


@pytest.mark.parametrize(
    ("signature", "parameters", "message", "hint"),
    [
        (
            "aten::add.Tensor",
            [SELF, OUT],
            "has no parameter for 'other' of aten::add.Tensor, which every call",
            "ignore=",
        ),
        (
            "aten::relu",
            [SELF, OUT, Parameter("numell", "long")],
            "parameter 'numell' of kernel 'k' for aten::relu is neither an argument nor a result",
            "derived={...}",
        ),
        (
            "aten::relu",
            [Parameter("slef", "const float*"), OUT],
            "'slef' of kernel 'k' for aten::relu is neither",
            "did you mean 'self'? it has 'out' or 'self'",
        ),
        (
            "aten::relu",
            [SELF, OUT, Parameter("n", "int", derived="x.numel() + 1")],
            "derives 'x.numel() + 1': 'x' is neither an argument nor a result of aten::relu",
            None,
        ),
        (
            "aten::max.dim",
            [SELF, Parameter("out", "float*")],
            "'out' of kernel 'k' for aten::max.dim is neither",
            "'out0', 'out1', 'self' or 'values'",
        ),
        ("aten::max.dim", [SELF, Parameter("out2", "float*")], "parameter 'out2' of kernel 'k'", None),
        (
            "aten::relu",
            [SELF, OUT, Parameter("dim", "void")],
            "parameter 'dim' of kernel 'k' for aten::relu is neither",
            "it has 'self'",
        ),
        (
            "aten::relu",
            [SELF, OUT, Parameter("n", "float4", derived="1")],
            "is a float4, which no argument is",
            "a pointer to it",
        ),
        (
            "aten::relu",
            [SELF, OUT, Parameter("n", "Tensor")],
            "parameter 'n' of kernel 'k' for aten::relu: 'Tensor' is no type",
            None,
        ),
        (
            "aten::relu",
            [SELF, OUT, Parameter("numel", "int", Access.IN)],
            "is declared 'in', but int is no pointer",
            None,
        ),
        (
            "aten::relu",
            [SELF, OUT, Parameter("numel", "int", optional=True)],
            "is declared optional, but int is no",
            None,
        ),
        (
            "aten::relu",
            [SELF, OUT, Parameter("n", "int*", derived="1")],
            "is a int32_t*, but a derived value is no",
            None,
        ),
        (
            "aten::relu",
            [SELF, Parameter("numel", "int*")],
            "but 'numel' is derived from others, and no tensor",
            None,
        ),
        (
            "aten::add.Tensor",
            [SELF, OTHER, OUT, Parameter("alpha", "const float*")],
            "is a const float*, but 'alpha' is of type number, and no tensor",
            None,
        ),
        (
            "aten::cat",
            [Parameter("tensors", "const float*"), OUT],
            "but 'tensors' is a list of tensors",
            "'tensors0', 'tensors1'",
        ),
        (
            "aten::relu",
            [Parameter("self", "float*"), OUT],
            "may be written, but the operator does not write its argument",
            "const float*",
        ),
        (
            "aten::relu",
            [Parameter("self", "const float*", Access.INOUT), OUT],
            "which cannot be written, but it is 'inout'",
            None,
        ),
        (
            "aten::relu",
            [SELF, Parameter("out", "const float*")],
            "which cannot be written, but it is 'out'",
            None,
        ),
        (
            "aten::relu",
            [SELF, Parameter("out", "float*", Access.IN)],
            "is declared 'in', but a result is only written",
            "Access.OUT",
        ),
        (
            "aten::relu",
            [SELF, Parameter("out", "float*", Access.INOUT)],
            "'inout', but a result is only written",
            None,
        ),
        (
            "aten::relu",
            [Parameter("self", "void", derived="out"), OUT],
            "is right for 'out' only, which is not one value",
            None,
        ),
        (
            "aten::relu",
            [Parameter("self", "void", derived="1 //"), OUT],
            "parameter 'self' of kernel 'k' for aten::relu: ",
            None,
        ),
    ],
)
def test_prototypes_that_do_not_fit_their_operator(signature, parameters, message, hint):
    with pytest.raises(PackingError) as caught:
        bind(signature, *parameters)
    assert message in caught.value.message
    assert hint is None or hint in caught.value.hint


# -- against a call, as a registry chooses

X = tensor(0, 2, 3)


@pytest.mark.parametrize(
    ("parameters", "arguments", "refused"),
    [
        ([SELF, OTHER, OUT], {"self": X, "other": X}, None),
        ([SELF, OTHER, OUT], {"self": X, "other": 2.0}, "takes a tensor as 'other', not the float 2.0"),
        ([SELF, OTHER, OUT], {"self": X, "other": None}, "takes a tensor as 'other', not None"),
        ([SELF, Parameter("other", "const float*", optional=True)], {"self": X, "other": None}, None),
        ([SELF, Parameter("other", "float")], {"self": X, "other": 2**70}, None),
        (
            [SELF, Parameter("other", "float")],
            {"self": X, "other": X},
            "takes a number as 'other', not the tensor f32[2, 3]",
        ),
        ([SELF, Parameter("other", "int", derived="other.numel()")], {"self": X, "other": X}, None),
        ([SELF, Parameter("other", "void")], {"self": X, "other": X}, None),
        ([SELF, Parameter("other", "void", derived="1")], {"self": X, "other": True}, None),
        (
            [SELF, Parameter("other", "void", derived="1")],
            {"self": X, "other": 2},
            "is right only for other=1, not 2",
        ),
        ([SELF, Parameter("other", "void", derived="(0, 0)")], {"self": X, "other": (0, 0)}, None),
        ([SELF, Parameter("other", "void", derived="nan")], {"self": X, "other": math.nan}, None),
        ([SELF, Parameter("other", "void", derived="'float32'")], {"self": X, "other": torch.float32}, None),
        ([Parameter("self", "Tensor", Access.OUT)], {"self": 1}, None),
        ([OUT], {"self": 1}, None),
    ],
)
def test_kinds_of_arguments_that_a_prototype_is_not_for(parameters, arguments, refused):
    kernel = KernelDescriptor("aten::add.Tensor", "k", parameters=tuple(parameters))
    assert prototype_refusal(kernel, call(0, "aten::add.Tensor", arguments, [tensor(2, 2, 3)])) == refused


# -- broadcast


@pytest.mark.parametrize(
    ("parameters", "shapes", "taken"),
    [
        ("const float *self, const float *other, float *out, long numel", [(2, 3), (2, 3)], True),
        ("const float *self, const float *other, float *out, long numel", [(2, 3), (3,)], False),
        ("const float *self, const float *other, float *out, long numel", [(2, 3), ()], False),
        ("const float *self, const float *other, float *out, long numel", [(1, 3), (2, 3)], False),
        ("const float *self, const float *other, float *out, long numel, long other_stride0", [(2, 3), (1, 3)], True),
        ("const float *self, const float *other, float *out, long numel, long self_stride0", [(2, 3), (1, 3)], False),
    ],
)
def test_a_pointwise_kernel_takes_a_broadcast_tensor_only_if_it_asks_how_that_lies(parameters, shapes, taken):
    kernel = KernelDescriptor("aten::mul.Tensor", "mul", parameters=parse_prototype(f"void mul({parameters})"))
    one, other = (tensor(buffer, *shape) for buffer, shape in enumerate(shapes))
    made = tensor(2, *torch.broadcast_shapes(*shapes))
    told = prototype_refusal(kernel, call(0, "aten::mul.Tensor", {"self": one, "other": other}, [made]))
    assert (told is None) is taken, told
    assert taken or "which is broadcast" in told


def test_what_is_not_pointwise_may_have_other_shapes():
    kernel = KernelDescriptor("aten::mm", "mm", parameters=parse_prototype("void mm(const float *self, float *out)"))
    product = call(0, "aten::mm", {"self": tensor(0, 2, 3), "mat2": tensor(1, 3, 4)}, [tensor(2, 2, 4)])
    assert prototype_refusal(kernel, product) is None


@pytest.mark.parametrize(
    ("declared", "meant"),
    [
        ("__local float *scratch", "local float*"),
        ("local float4 *restrict scratch", "local float4*"),
        ("__shared__ unsigned int scratch[]", "local unsigned int*"),
        ("volatile __local real *scratch", "local double*"),
    ],
)
def test_local_memory_is_a_parameter(declared, meant):
    text = f"typedef double real; __kernel void f(__global const float *self, {declared})"
    assert parse_prototype(text, derived={"scratch": "self.numel() + 1"})[1] == Parameter(
        "scratch", meant, derived="self.numel() + 1"
    )


def test_declarations_of_a_kernel_as_they_are_written():
    source = """
    typedef unsigned int count;
    static void helper(float x) {}
    __kernel __attribute__((reqd_work_group_size(4, 1, 1))) void f(__global const float *restrict x, // a, b
        read_only image2d_t y, count n, int sizes[3]) {}
    """
    assert kernel_declarations(source) == [
        ("__global const float *restrict", "x"),
        ("read_only image2d_t", "y"),
        ("unsigned int", "n"),
        ("int*", "sizes"),
    ]
    assert kernel_declarations("__kernel void f() {}", "f") == []
    assert type_definitions(source) == {"count": "unsigned int"}
