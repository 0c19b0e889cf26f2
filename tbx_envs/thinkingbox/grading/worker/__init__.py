"""The check worker: a program of its own, `python tbx_envs/thinkingbox/grading/worker CONTROL_FD SETTINGS`.

This folder is the import root of that program, so that test code finds `thinkingbox` in it. Nothing in here imports
`tbx_envs`, and `tbx_envs` imports nothing from it but `check_server.frames`.
"""
