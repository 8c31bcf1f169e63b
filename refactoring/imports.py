import ast,pathlib,textwrap
PK=('learner','actor','bridge','configs','launch','tests')
names={}
def have(mod):
    if mod in names: return names[mod]
    p=pathlib.Path(mod.replace('.','/')+'.py'); q=pathlib.Path(mod.replace('.','/'))/'__init__.py'
    s=set()
    for f in (p,q):
        if f.exists():
            for n in ast.walk(ast.parse(f.read_text())):
                if isinstance(n,(ast.FunctionDef,ast.ClassDef,ast.AsyncFunctionDef)): s.add(n.name)
                if isinstance(n,(ast.Import,ast.ImportFrom)): s|={(a.asname or a.name).split('.')[0] for a in n.names}
                if isinstance(n,ast.Name) and isinstance(n.ctx,ast.Store): s.add(n.id)
    if q.parent.is_dir(): s|={x.stem for x in q.parent.glob('*')}
    names[mod]=s; return s
for root in PK+('docs',):
  for p in pathlib.Path(root).rglob('*.py'):
    t=ast.parse(p.read_text())
    for n in ast.walk(t):
        if isinstance(n,ast.Constant) and isinstance(n.value,str) and 'import' in n.value and any(k in n.value for k in PK):
            for line in n.value.replace(';','\n').split('\n'):
                line=line.strip()
                try: x=ast.parse(line)
                except SyntaxError: continue
                for i in ast.walk(x):
                    if isinstance(i,ast.ImportFrom) and i.module and i.module.split('.')[0] in PK:
                        for a in i.names:
                            if a.name not in have(i.module): print(p,n.lineno,i.module,a.name)
