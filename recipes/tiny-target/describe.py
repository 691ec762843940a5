"""English about one function, computed from its syntax tree.

Imported by chats.py. Phrases follow the source's order and quote it where it is short.
"""

import ast

MAX_EXPRESSION_CHARS = 32
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def _short(node: ast.AST | None, *, instead: str) -> str:
    text = ast.unparse(node) if node is not None else ""
    return f"`{text}`" if 0 < len(text) <= MAX_EXPRESSION_CHARS and "`" not in text else instead


def _join(items: list[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def argument_names(node: FunctionNode) -> list[str]:
    """The argument names without self or cls."""
    args = node.args
    names = [arg.arg for arg in args.posonlyargs + args.args + args.kwonlyargs]
    names += ["*" + args.vararg.arg] if args.vararg else []
    names += ["**" + args.kwarg.arg] if args.kwarg else []
    return [name for name in names if name not in ("self", "cls")]


def _statement_step(stmt: ast.stmt) -> tuple[str, str]:
    """A verb and its object for one statement; an empty verb means nothing to say."""
    match stmt:
        case ast.Assign(targets=[target, *_]) | ast.AnnAssign(target=target):
            return "sets", _short(target, instead="some values")
        case ast.AugAssign(target=target):
            return "updates", _short(target, instead="a value")
        case ast.Expr(value=ast.Call(func=func)) | ast.Expr(value=ast.Await(ast.Call(func=func))):
            return "calls", _short(func, instead="a method")
        case ast.Expr(value=ast.Yield(value=value)):
            return "yields", _short(value, instead="a value")
        case ast.For(iter=source) | ast.AsyncFor(iter=source):
            return "loops over", _short(source, instead="a sequence")
        case ast.While(test=test):
            return "repeats while", _short(test, instead="a condition holds")
        case ast.If(test=test):
            return "checks", _short(test, instead="a condition")
        case ast.With(items=[item, *_]) | ast.AsyncWith(items=[item, *_]):
            return "enters", _short(item.context_expr, instead="a context")
        case ast.Raise(exc=exc):
            return "raises", _short(exc.func if isinstance(exc, ast.Call) else exc, instead="again")
        case ast.Assert(test=test):
            return "asserts", _short(test, instead="a condition")
        case ast.Try(handlers=[handler, *_]):
            return "handles", _short(handler.type, instead="any error")
        case ast.Import(names=[name, *_]):
            return "imports", f"`{name.name}`"
        case ast.ImportFrom(module=str(module)):
            return "imports from", f"`{module}`"
        case ast.Delete(targets=[target, *_]):
            return "deletes", _short(target, instead="a value")
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return "defines", f"`{name}`"
        case _:
            return "", ""


def find_steps(node: FunctionNode) -> list[str]:
    """What the body does, in source order; equal verbs in a row share one phrase."""
    found: list[tuple[str, list[str]]] = []

    def visit(stmts: list[ast.stmt]) -> None:
        for stmt in stmts:
            verb, item = _statement_step(stmt)
            if verb and found and found[-1][0] == verb:
                if item not in found[-1][1] and len(found[-1][1]) < 3:
                    found[-1][1].append(item)
            elif verb:
                found.append((verb, [item]))
            if not isinstance(stmt, ast.FunctionDef | ast.ClassDef):
                visit(getattr(stmt, "body", []))

    visit(node.body)
    return [f"{verb} {_join(items)}" for verb, items in found if items][:4]


def _describe_return(node: FunctionNode) -> str:
    returned = _first_return(node)
    if returned is None:
        return ""
    value = returned.value
    if isinstance(value, ast.Call):
        return _short(value, instead="the result of " + _short(value.func, instead="a call"))
    return _short(value, instead="a computed value")


def _first_return(node: FunctionNode) -> ast.Return | None:
    returns = [n for n in ast.walk(node) if isinstance(n, ast.Return) and n.value is not None]
    return min(returns, key=lambda n: n.lineno) if returns else None


def explain(node: FunctionNode, template: str) -> str:
    """Fill one explanation template from the syntax tree."""
    end = _describe_return(node)
    steps = find_steps(node)
    is_method = bool(node.args.args) and node.args.args[0].arg in ("self", "cls")
    names = [f"`{name}`" for name in argument_names(node)]
    label = "no arguments" if not names else "the argument" + "s" * (len(names) > 1) + " "
    if not steps:
        steps, end = ([f"returns {end}"], "") if end else (["does nothing"], "")
    return template.format(
        noun="method" if is_method else "function",
        name=node.name,
        args=label + (_join(names) if names else ""),
        body=_join(steps),
        steps=", then ".join(steps),
        end=f" It returns {end}." if end else "",
    )


def list_facts(node: FunctionNode) -> str:
    """The arguments, calls, exceptions and result as a list."""
    calls = [n.func for n in ast.walk(node) if isinstance(n, ast.Call)]
    calls.sort(key=lambda func: (func.lineno, func.col_offset))
    called = [c for c in dict.fromkeys(_short(func, instead="") for func in calls) if c][:4]
    raised = [n.exc for n in ast.walk(node) if isinstance(n, ast.Raise) and n.exc]
    rows = [
        ("Arguments", ", ".join(f"`{name}`" for name in argument_names(node)) or "none"),
        ("Calls", ", ".join(called) or "nothing"),
    ]
    if raised:
        error = raised[0].func if isinstance(raised[0], ast.Call) else raised[0]
        rows.append(("Raises", _short(error, instead="an error")))
    rows.append(("Returns", _describe_return(node) or "nothing"))
    return "\n".join(f"- {name}: {value}" for name, value in rows)
