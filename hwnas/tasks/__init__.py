"""The tasks: the work that networks shall do with images. Each is a class; the rest of hwnas uses `Task` alone."""

from hwnas.tasks.task import Grades, Task, load_task

__all__ = ["Grades", "Task", "load_task"]
