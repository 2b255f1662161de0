"""``headrace demo``: the main job from end to end, without downloads.

Part A embeds sentences with a real checkpoint; part B generates text with a language model of 1 GB. Each runs twice,
with all weights resident and streamed from disk, in a process of its own whose memory is measured; the results have to
be the same bit for bit.
"""
