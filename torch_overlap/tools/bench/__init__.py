"""`python -m torch_overlap bench`: compares our operators and collectives with other libraries in one run.

docs/results.md has the results, docs/howto/tuning.md describes the method. The modules, from values to commands:

- cases: operations, shapes, and the order of a run. floor: the least time that the hardware allows.
- timing: samples that all ranks start together, in rounds whose order rotates; medians and ratios.
- ranks: the processes of a run. rates: their bandwidths. libraries: the collectives of other libraries.
- problem: the variants of a case; gemms, collectives, build: the variants for each operation.
- measure, trace, run: from cases to rows. result: rows as a file.
- report: rows as text. cli: the command.

The command is public, the modules are not.
"""

__all__: list[str] = []
