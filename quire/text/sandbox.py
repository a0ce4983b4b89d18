"""The environment of chat templates: they see the data they are given, and do a bounded amount of work.

A template is a program out of a model's files. Jinja's sandbox keeps it from attributes that lead anywhere, and there
is no loader, so it cannot name a file. What Jinja leaves open is work without end (loops within loops, a string doubled
sixty times); here everything that repeats or grows is paid for out of a `Budget` first.
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import wraps
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from quire.text.budget import STEP, Budget


class RefusedByTemplate(jinja2.TemplateError):
    """The template called `raise_exception`."""


class _MeteredContext(Context):
    budget: Budget

    def derived(self, locals: dict[str, Any] | None = None) -> "_MeteredContext":
        context = super().derived(locals)
        assert isinstance(context, _MeteredContext), "the environment makes contexts of its own class"
        context.budget = self.budget
        return context


class _Metered(NodeTransformer):
    """Routes loops, `~` and literals through the environment, by a path that no variable can shadow."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._call("turns", [cast(nodes.Expr, node.iter)], node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("join", node.nodes, node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return self._call("weigh", [node], node.lineno)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return self._call("weigh", [node], node.lineno)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return self._call("weigh", [node], node.lineno) if node.ctx == "load" else node

    @staticmethod
    def _call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
        function = nodes.EnvironmentAttribute(name)
        return nodes.Call(function, [nodes.ContextReference(), *arguments], [], None, None, lineno=line)


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; here its text is kept as it is."""

    tags = frozenset(("generation",))  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    """`namespace()`, which keeps no name that begins with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that `self` may be one of the names
        self, *rest = args
        Namespace.__init__(self)
        for name, value in dict(*rest, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace cannot hold the name {name!r}")
        Namespace.__setitem__(self, name, value)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it, metered. Holds no state of a rendering, so any thread may use it."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    context_class = _MeteredContext

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _to_json
        self.filters = {name: _metered(name, function) for name, function in self.filters.items()}
        self.globals = {name: self.globals[name] for name in ("range", "dict", "cycler", "joiner")}
        self.globals |= {
            "namespace": _Namespace,
            "raise_exception": _refuse,
            "strftime_now": lambda format: now().strftime(format),
        }

    def render(self, template: jinja2.Template, variables: Mapping[str, Any], budget: Budget) -> str:
        context = template.new_context(dict(variables))
        assert isinstance(context, _MeteredContext), "the environment makes contexts of its own class"
        context.budget = budget
        texts: list[str] = []
        for text in template.root_render_func(context):
            budget.grow(len(text))
            texts.append(text)
        return "".join(texts)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Metered().visit(source), *args, **kwargs)

    # Called by templates, through `_Metered`.

    def turns(self, context: _MeteredContext, items: Any) -> Any:
        return context.budget.turns(items)

    def join(self, context: _MeteredContext, *parts: Any) -> str:
        return context.budget.join(*parts)

    def weigh(self, context: _MeteredContext, value: Any) -> Any:
        return context.budget.weigh(value)

    # Called by Jinja for every call and every intercepted operator.

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget_of(__context)
        budget.spend(STEP)
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            budget.before_call(method.__name__, owner, list(args), kwargs)
        found = super().call(__context, __obj, *args, **kwargs)
        return budget.weigh(found) if isinstance(found, (list, tuple, dict)) else found

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget_of(context)
        budget.before_operator(operator, left, right)
        found = super().call_binop(context, operator, left, right)
        return budget.weigh(found) if isinstance(found, (list, tuple)) else found


def _budget_of(context: Context) -> Budget:
    assert isinstance(context, _MeteredContext), "the environment makes contexts of its own class"
    return context.budget


_ATTRIBUTE_OF = {"eval_context": "eval_ctx", "environment": "environment"}  # that Jinja passes to filters


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, paid for by the rendering that calls it."""
    takes = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @jinja2.pass_context
    @wraps(function, updated=())
    def metered(context: Context, *args: Any, **kwargs: Any) -> Any:
        budget = _budget_of(context)
        if args and name == "format":  # by percent signs, unlike the method
            budget.spend(STEP)
            budget.before_operator("%", str(args[0]), args[1:] or kwargs)
        elif args:
            budget.before_call(name, args[0], list(args[1:]), kwargs)
        first: tuple[Any, ...] = ()
        if takes is not None:
            first = (context if takes == "context" else getattr(context, _ATTRIBUTE_OF[takes]),)
        found = function(*first, *args, **kwargs)
        if isinstance(found, str):
            budget.grow(len(found))
        return budget.weigh(found) if isinstance(found, (list, tuple, dict)) else found

    return metered


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without HTML escapes; Jinja's own filter escapes `<` and quotes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: object) -> str:
    raise RefusedByTemplate(str(message))
