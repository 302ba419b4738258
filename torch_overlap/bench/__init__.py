"""`python -m torch_overlap bench`: our operators and collectives beside what else there is, in one run.

docs/performance.md has the results and says how they are measured. The modules, from values to commands:

- cases: operations, shapes, and the order of a run. floor: the least time that the hardware allows.
- timing: samples that all ranks begin together, in rounds whose order rotates; medians and ratios.
- ranks: the processes of a run. libraries: the collectives of others. problems: what is timed for a case.
- measure, run: cases to rows. result: rows to a file. report, goals, document, plots: what is made of files. cli.
"""
