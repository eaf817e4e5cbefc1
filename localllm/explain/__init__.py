"""How an answer was made: recorder.py watches it, record.py holds what it saw, choices.py shows what samplers did,
costs.py knows what operations read and multiply, account.py adds up, page.py writes an HTML page.
"""
