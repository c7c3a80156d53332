"""``phase-offload bench offload``: this engine and its peers, each in a fresh process, on one made model.

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
"""
