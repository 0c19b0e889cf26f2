"""The check worker, a separate program: `python tbx_envs/thinkingbox/grading/worker CONTROL_FD SETTINGS`.

This folder is the import root of that program, so that test code finds `thinkingbox` in it. Nothing in it imports
`tbx_envs`, and `tbx_envs` imports nothing from it but `check_server.frames`.
"""
