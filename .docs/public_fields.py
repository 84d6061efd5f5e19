"""Docstrings for the reference: inherited ones for methods, and links to the heads of modules that they name.

Private fields of dataclasses have no entry.
"""

import griffe


class PublicFields(griffe.Extension):
    def on_class_members(self, *, cls, **_):
        for name, member in list(cls.members.items()):
            if name.startswith("_") and member.is_attribute:
                cls.del_member(name)

    def link_head(self, function):  # pages begin with the docstring of a module
        link = '<a href="./">the head of this page</a>'
        function.docstring.value = function.docstring.value.replace("the module docstring", link)

    def on_package(self, *, pkg, **_):
        todo = [pkg]
        while todo:
            here = todo.pop()
            if here.docstring and not here.is_module:
                self.link_head(here)
            todo += [
                x for x in here.members.values() if not x.is_alias and (x.is_module or x.is_class or x.is_function)
            ]
            if here.is_class:
                for name, member in here.members.items():
                    bases = (base.members.get(name) for base in here.mro())
                    if member.is_function and not member.docstring:
                        member.docstring = next((x.docstring for x in bases if x and x.docstring), None)
