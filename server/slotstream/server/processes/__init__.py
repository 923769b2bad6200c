"""The processes of `serve --workers N`, and how they speak to the primary one."""
