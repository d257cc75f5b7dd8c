"""Scripts that make what ships in data/.

Run one in the root of the repository: `python -m data.make.NAME`.
"""
