"""ONNX Runtime and OpenVINO: a model is exported once, and runs without PyTorch from then on."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Call = Callable[[], Any]


def prepare_onnxruntime(module: nn.Module, args: tuple[Any, ...], directory: Path, threads: int) -> Call:
    """Export a model, if that was not done before, load it into ONNX Runtime, call it, and return the call.

    Parameters
    ----------
    module, args
        The model and its arguments.
    directory
        Where the exported file is, or comes.
    threads
        That a call may use.
    """
    runtime: Any = importlib.import_module("onnxruntime")
    path = directory / "model.onnx"
    if not path.exists():
        export_onnx(module, args, path)
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    feeds = dict(zip(names, _arrays(args), strict=True))

    def call() -> Any:
        return session.run(None, feeds)

    call()
    return call


def export_onnx(module: nn.Module, args: tuple[Any, ...], path: Path) -> None:
    """Write a model as an ONNX file, weights beside it: by PyTorch's newer exporter, else by its older one.

    Raises
    ------
    RuntimeError
        When neither can.
    """
    with _quiet():
        try:
            torch.onnx.export(module, args, str(path), dynamo=True, external_data=True, verbose=False)
        except Exception as error:  # noqa: BLE001  whatever the newer exporter raises, the older one may succeed
            try:
                torch.onnx.export(module, args, str(path), dynamo=False, verbose=False)
            except Exception as second:
                path.unlink(missing_ok=True)
                raise RuntimeError(f"the model cannot be exported: {_first_line(error)}") from second


def prepare_openvino(module: nn.Module, args: tuple[Any, ...], directory: Path, threads: int) -> Call:
    """Convert a model, if that was not done before, load it into OpenVINO, call it, and return the call.

    Where OpenVINO cannot convert the PyTorch module, it gets it as an ONNX file. Its precision is set to float32, for
    on some processors it would take bfloat16 by itself.

    Parameters
    ----------
    module, args
        The model and its arguments.
    directory
        Where the converted file is, or comes.
    threads
        That a call may use.
    """
    openvino: Any = importlib.import_module("openvino")
    path = directory / "model.xml"
    if not path.exists():
        openvino.save_model(_converted(openvino, module, args, directory), str(path), compress_to_fp16=False)
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    request = openvino.Core().compile_model(str(path), "CPU", settings).create_infer_request()
    arrays = _arrays(args)
    outputs = len(request.model_outputs)

    def call() -> list[Any]:
        result = request.infer(arrays, share_inputs=True, share_outputs=True)
        return [result[index] for index in range(outputs)]

    call()
    return call


def _converted(openvino: Any, module: nn.Module, args: tuple[Any, ...], directory: Path) -> Any:
    with _quiet():
        try:
            converted = openvino.convert_model(module, example_input=args)
            shapes = {port: list(arg.shape) for port, arg in zip(converted.inputs, _tensors(args), strict=True)}
            converted.reshape(shapes)
        except Exception as error:  # noqa: BLE001  whatever the conversion raises, the other way may succeed
            path = directory / "model.onnx"
            try:
                importlib.import_module("onnx")
                export_onnx(module, args, path)
                converted = openvino.convert_model(str(path))
            except Exception as second:
                raise RuntimeError(f"the model cannot be converted: {_first_line(error)}") from second
    return converted


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what exporters say of their own progress from the output."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


def _tensors(args: tuple[Any, ...]) -> list[Tensor]:
    others = [type(arg).__name__ for arg in args if not isinstance(arg, Tensor)]
    if others:
        raise TypeError(f"an engine takes tensors, and an argument is a {others[0]}")
    return list(args)


def _arrays(args: tuple[Any, ...]) -> Sequence[Any]:
    return [tensor.numpy() for tensor in _tensors(args)]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
