"""Notations of calls that are not JSON: tags around each argument, Python's literals, and what schemas make of text.

Pure, and without a word of the chat core: each scanner takes characters until it is done or broken, and then has calls
as names and the JSON text of their arguments.
"""
