"""``phase-offload bench``: measurements that the command makes on models made for them.

``bench offload``: this engine and its peers, each in a fresh process, on one made model.

model.py        makes the model once and knows its inputs
job.py          what one process is asked to do, and the row it answers with
ways.py         every way to run the model on less memory than it has weights
measure.py      runs one way in this process
memory_limit.py a memory control group around a process
floor.py        how fast it could be at best: compute, and reads beside compute
micro.py        what one weight access costs, and a step of a tiny model
accelerator.py  the cases of a machine with an accelerator
offload.py      the command: cases x ways, ratios
table.py        the rows as text

``bench foresight``: what is foretold of a job beside what happens, on tiny models of many families.

foresight_cases.py    families, sizes, models, and all that is foretold of one case
live_bytes.py         counts live tensors, independently of the trace
activations.py        peaks of activations of every component
budgets.py            peaks of phases in budgets, and whether a job fits
step_times.py         seconds of a denoising step
foresight.py          the command: families x sizes x budgets, shares
foresight_summary.py  the shares, and whether targets are met
foresight_table.py    the rows as text

``phase-offload families``: docs/families.md, every cell of it a run.

family_cases.py   the rows: families and tasks, each with its model
family_cells.py   the checks of a row
family_loras.py   a LoRA for any pipeline
families_table.py the page
families.py       the command
"""
