"""Keeps private fields of dataclasses out of the signatures in the reference."""

import griffe


class PublicFields(griffe.Extension):
    def on_class_members(self, *, cls, **_):
        for name, member in list(cls.members.items()):
            if name.startswith("_") and member.is_attribute:
                cls.del_member(name)
