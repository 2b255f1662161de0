"""From candidates to a plan: units, slots, budget, report. Pure Python over names and sizes.

Empty of imports: the process that reads files for a GPU needs the layout of its ring and no torch.
"""
