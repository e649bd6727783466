"""Many sessions at once: a scheduler over recorded steps.

requests    what is asked of the scheduler, and what it says back; ``inbox``, ``jobs``: on the way through it
scheduler   one thread that reads prompts in pieces and decodes all sessions together
sessions    histories in memory: opened, reserved for, kept while idle, let go
places      the places of recorded steps, and the steps under way
tuning      drafts, batch size and length of pieces, by what was measured
"""
