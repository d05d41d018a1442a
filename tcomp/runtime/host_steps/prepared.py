"""A host step, checked and ready to be performed."""

from __future__ import annotations

from tcomp.errors import ArtifactError, InputError, TcompError
from tcomp.runtime.host_steps.operators import OPERATORS, Operator
from tcomp.runtime.host_steps.steps import STRING, Array, Step
from tcomp.runtime.schema import read


class PreparedStep:
    """A step that is ready to be performed. Raises ArtifactError for one that is malformed."""

    def __init__(self, step: Step, where: tuple[str | int, ...]) -> None:
        if step.operator not in OPERATORS:
            raise ArtifactError(
                f"the artifact has a host step of an unknown operator {step.operator!r:.60}", hint="compile the model again"
            )
        self.step, self.operator = step, OPERATORS[step.operator]
        attributes = read(self.operator.attributes, step.attributes, *where, "attributes")
        try:
            self.attributes = self.operator.prepare(attributes)
        except InputError as error:
            raise error.restated(ArtifactError, where=self.label) from error
        _check_numbers(step, self.operator)
        expected = getattr(attributes, "parts", len(step.outputs)) if self.operator.outputs is None else self.operator.outputs
        if len(step.outputs) != expected:
            raise ArtifactError(f"a host step has {len(step.outputs)} outputs, its operator {expected}", where=self.label)

    @property
    def label(self) -> str:
        """What it is called in messages and profiles."""
        return f"host step {self.step.name} ({self.step.operator})"

    def perform(self, values: dict[str, Array]) -> None:
        """Add the results to the values. Raises InputError for inputs that it cannot take."""
        arguments = [values[name] for name in self.step.inputs]
        try:
            results = self.operator.function(arguments, self.attributes)
        except TcompError as error:
            raise error.restated(type(error), where=self.label) from None
        except (ValueError, TypeError, IndexError, OverflowError, MemoryError, AttributeError) as problem:
            shapes = ", ".join(f"{_type_of(a)}{[*a.shape]}" for a in arguments)
            raise InputError(f"the {self.label} cannot take {shapes}", why=str(problem)) from None
        values.update(zip(self.step.outputs, results, strict=True))


def _check_numbers(step: Step, operator: Operator) -> None:
    if not operator.least <= len(step.inputs) <= operator.most:
        raise ArtifactError(f"a host step of {step.operator} has {len(step.inputs)} inputs", where=f"host step {step.name}")


def _type_of(array: Array) -> str:
    return STRING if array.dtype == object else array.dtype.name
