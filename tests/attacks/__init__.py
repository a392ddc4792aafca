"""Attacks on the exchange, and what must come of them: each a campaign that is counted, printed and asserted.

``RDMACONNECT_CAMPAIGN`` says how much is done of each: 1, the default, takes a minute in all; 100 is the whole.
"""
