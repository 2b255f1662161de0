"""From a policy and an inventory to a plan, its cost and a report: functions of names and sizes, without a device.

Empty of imports: the process that reads files for a GPU needs the layout of its ring and no torch.
"""
