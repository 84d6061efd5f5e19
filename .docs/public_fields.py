"""Keeps private fields of dataclasses out of the reference, and gives methods the docstrings that they inherit."""

import griffe


class PublicFields(griffe.Extension):
    def on_class_members(self, *, cls, **_):
        for name, member in list(cls.members.items()):
            if name.startswith("_") and member.is_attribute:
                cls.del_member(name)

    def on_package(self, *, pkg, **_):
        todo = [pkg]
        while todo:
            here = todo.pop()
            todo += [x for x in here.members.values() if not x.is_alias and (x.is_module or x.is_class)]
            if here.is_class:
                for name, member in here.members.items():
                    bases = (base.members.get(name) for base in here.mro())
                    if member.is_function and not member.docstring:
                        member.docstring = next((x.docstring for x in bases if x and x.docstring), None)
