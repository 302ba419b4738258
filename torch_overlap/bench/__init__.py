"""`python -m torch_overlap bench`: our operators and collectives beside what else there is, in one run.

docs/results.md has the results, docs/tuning.md says how they are measured. The modules, from values to commands:

- cases: operations, shapes, and the order of a run. floor: the least time that the hardware allows.
- timing: samples that all ranks begin together, in rounds whose order rotates; medians and ratios.
- ranks: the processes of a run. rates: their bandwidths. libraries: the collectives of others.
- problem: the ways to do a case; gemms, collectives, build: what these are for each operation.
- measure, trace, run: from cases to rows. result: rows as a file.
- report, goals, tables, plots, document: what is made of rows. cli: the command.

The command is public, the modules are not.
"""

__all__: list[str] = []
