"""Checks a moved tree without running it: imports that name nothing, attributes of modules that are not there, names of
before, circles of files, long files. usage: check.py [--layers PACKAGE]"""
import ast, collections, pathlib, subprocess, sys
import source
fs=[f for f in subprocess.check_output(["git","ls-files"],text=True).split() if f.endswith(".py") and pathlib.Path(f).exists()]
S={f:source.read(f) for f in fs}
M={s.module:s for s in S.values()}
P=("actor","bridge","configs","launch","learner","tests","docs")
def has(m,name):
    s=M[m]
    if f"{m}.{name}" in M: return True
    if s.is_package and any(k.startswith(f"{m}.{name}.") for k in M): return True
    if "__getattr__" in s.defined: return True
    return name in s.top.bound or name.startswith("__")
edges=collections.defaultdict(set); lazy=collections.defaultdict(set)
for f,s in S.items():
    mods={}
    for a in s.aliases:
        if a.module.split(".")[0] not in P: continue
        full=f"{a.module}.{a.name}" if a.name else a.module
        if a.module not in M and full not in M and not any(k.startswith(a.module+".") for k in M): print("NO MODULE",f,a.node.lineno,a.module); continue
        if a.name and full not in M and (a.module not in M or not has(a.module,a.name)): print("NO NAME",f,a.node.lineno,full); continue
        to=full if full in M else a.module
        (edges if a.scope is s.top and not a.in_type_checking else lazy)[s.module].add(to)
        if full in M and (a.name or a.asname): mods[a.scope,a.bound]=full
    for r in s.refs:
        m=mods.get((r.owner,r.name)); p=s.parents.get(r.node)
        if m and isinstance(p,ast.Attribute) and p.value is r.node and not has(m,p.attr): print("NO ATTRIBUTE",f,r.node.lineno,m,p.attr)
        if m and isinstance(p,ast.Call) and len(p.args)>1 and p.args[0] is r.node and isinstance(p.args[1],ast.Constant) and isinstance(p.args[1].value,str) and not has(m,p.args[1].value): print("NO ATTRIBUTE (string)",f,r.node.lineno,m,p.args[1].value)
def sccs(g):
    index={};low={};st=[];on=set();out=[];n=[0]
    sys.setrecursionlimit(10000)
    def go(v):
        index[v]=low[v]=n[0];n[0]+=1;st.append(v);on.add(v)
        for w in g.get(v,()):
            if w==v: continue
            if w not in index: go(w);low[v]=min(low[v],low[w])
            elif w in on: low[v]=min(low[v],index[w])
        if low[v]==index[v]:
            c=[]
            while True:
                w=st.pop();on.discard(w);c.append(w)
                if w==v:break
            if len(c)>1: out.append(c)
    for v in list(g):
        if v not in index: go(v)
    return out
prod={m:{e for e in v if e.split(".")[0]!="tests"} for m,v in edges.items() if m.split(".")[0]!="tests"}
for c in sccs(prod): print("CIRCLE",c,[ (a,b) for a in c for b in prod[a] if b in c])
both={m:prod.get(m,set())|{e for e in lazy.get(m,()) } for m in set(prod)|{m for m in lazy if m.split(".")[0]!="tests"}}
for c in sccs(both): print("circle with lazy imports",c)
for pk in sys.argv[sys.argv.index("--layers") + 1 :] if "--layers" in sys.argv else []:
    print("##", pk)
    def room(m):
        return m[len(pk) + 1 :].split(".")[0] if m.startswith(pk + ".") else None
    g = collections.defaultdict(set); why = collections.defaultdict(list)
    for m in M:
        a = room(m)
        if a is None: continue
        g[a]
        for e in both.get(m, ()):
            b = room(e)
            if b and b != a: g[a].add(b); why[a, b].append((m, e))
    left = dict(g); layers = []
    while left:
        low = [a for a in left if not (g[a] & set(left)) - {a}]
        if not low:
            for c in sccs({a: g[a] & set(left) for a in left}):
                print("  CIRCLE OF ROOMS:", c)
                for (a, b), w in why.items():
                    if a in c and b in c: print("     ", a, "->", b, w[:3])
            break
        layers.insert(0, sorted(low))
        for a in low: left.pop(a)
    for l in layers: print("    ", l)
for f in fs:
    n=S[f].text.count("\n")
    if n>400 and not f.startswith("tests"): print("over 400:",f,n)
