"""The engine: it finds out what is here, plans patches, puts them in force and proves it.

Importing this package imports nothing else. The bootstrap runs in every interpreter of a server, so a module
here imports neither torch nor vLLM when it is itself imported.
"""
