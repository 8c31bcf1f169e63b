# attributes set on module objects in tests: does the module have the name and does the user read it from there?
import ast,sys,pathlib,importlib
for p in pathlib.Path('tests').rglob('*.py'):
    src=p.read_text()
    def trees():
        t=ast.parse(src); yield t
        for n in ast.walk(t):
            if isinstance(n,ast.Constant) and isinstance(n.value,str) and '\n' in n.value and ('import ' in n.value):
                try: yield ast.parse(n.value)
                except SyntaxError as e: 
                    import textwrap
                    try: yield ast.parse(textwrap.dedent(n.value))
                    except SyntaxError: print('SYNTAX',p,n.lineno,n.value[:60].replace('\n','|'))
    for t in trees():
        mods={}
        for n in ast.walk(t):
            if isinstance(n,ast.ImportFrom) and n.module and n.level==0 and n.module.split('.')[0] in('learner','actor','bridge','configs','launch','tests'):
                for a in n.names:
                    path=pathlib.Path((n.module+'.'+a.name).replace('.','/'))
                    if path.with_suffix('.py').exists(): mods[a.asname or a.name]=n.module+'.'+a.name
        hits=[]
        for n in ast.walk(t):
            if isinstance(n,ast.Assign):
                for x in n.targets:
                    if isinstance(x,ast.Attribute) and isinstance(x.value,ast.Name) and x.value.id in mods: hits.append((mods[x.value.id],x.attr,n.lineno))
            if isinstance(n,ast.Call) and isinstance(n.func,ast.Attribute) and n.func.attr=='setattr' and len(n.args)>=3 and isinstance(n.args[0],ast.Name) and n.args[0].id in mods and isinstance(n.args[1],ast.Constant):
                hits.append((mods[n.args[0].id],n.args[1].value,n.lineno))
        for m,a,l in hits:
            f=pathlib.Path(m.replace('.','/')+'.py'); mt=ast.parse(f.read_text())
            uses=sum(isinstance(x,ast.Name) and x.id==a and isinstance(x.ctx,ast.Load) for x in ast.walk(mt))
            defs=any((isinstance(x,(ast.FunctionDef,ast.ClassDef)) and x.name==a) for x in ast.walk(mt))
            if uses==0: print(p,l,m,a,'unused in module','def' if defs else '')
