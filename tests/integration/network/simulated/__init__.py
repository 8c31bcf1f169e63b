"""Processes of a run without a model, on the real store and snapshots.

The real actor, with an engine that makes its tokens out of the bytes of the weights it has loaded; and a learner that
publishes, reads, acknowledges and keeps a ledger.
"""
