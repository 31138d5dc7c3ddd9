"""Generated kernels: expressions, lowering rules, and the printer base for C-family languages.

In the order in which data flows: `table` and `rules` say what an operator's elements are computed from, in terms of
`elements`; `lowering` makes one nest of loops (`kernel`) around `expressions` of a group of operators; `merging` joins
loops; `writer` and `loops` write them in the language that `c_family` spells. `generic` has parametrised kernels for
operators that are no loop nest. `generator` puts it together.
"""
