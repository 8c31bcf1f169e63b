"""Finds where each row of NAMES.tsv is defined now. resolve.py NAMES.tsv BASE > targets.json (problems on stderr)"""
import ast, csv, difflib, json, pathlib, subprocess, sys
PK=("learner","actor","bridge","configs","launch")
def defs(src,file):
    """(name, owner class or '', kind, line, col, text)"""
    out=[]; lines=src.splitlines(); t=ast.parse(src)
    def namecol(node,name):
        # col of the name in a def/class line
        l=node.lineno-1
        for i in range(l,min(l+1,len(lines))):
            raw=lines[i]; c=raw.find(name, node.col_offset)
            if c>=0: return i,c
        return l,node.col_offset
    def seg(n): return "\n".join(lines[n.lineno-1:n.end_lineno])
    def walk(node,owner,fn):
        for n in ast.iter_child_nodes(node):
            if isinstance(n,ast.ClassDef):
                l=n.lineno-1; c=lines[l].index(n.name,n.col_offset+5); out.append((n.name,owner,"class",l,c,seg(n))); walk(n,n.name,"")
            elif isinstance(n,(ast.FunctionDef,ast.AsyncFunctionDef)):
                l=n.lineno-1; c=lines[l].index(n.name,lines[l].index("def",n.col_offset)+3)
                out.append((n.name,owner,"function",l,c,seg(n)))
                a=n.args
                for p in a.posonlyargs+a.args+a.kwonlyargs: out.append((p.arg,(owner+"." if owner else "")+n.name,"param",p.lineno-1,p.col_offset,seg(n)))
                walk(n,owner,n.name)
            else:
                tg=[]
                if isinstance(n,ast.Assign): tg=n.targets
                elif isinstance(n,(ast.AnnAssign,ast.NamedExpr)): tg=[n.target]
                flat=[]
                for x in tg: flat+= x.elts if isinstance(x,(ast.Tuple,ast.List)) else [x]
                for x in flat:
                    if isinstance(x,ast.Name): out.append((x.id,(owner+"."+fn).strip(".") if fn else owner,"local" if fn else "const",x.lineno-1,x.col_offset,seg(n)))
                    elif isinstance(x,ast.Attribute) and isinstance(x.value,ast.Name) and x.value.id=="self": out.append((x.attr,owner,"attr",x.end_lineno-1,x.end_col_offset-len(x.attr),seg(n)))
                walk(n,owner,fn)
    walk(t,"","")
    return out
def index(commit=None):
    idx={}
    if commit:
        names=[f for f in subprocess.run(["git","ls-tree","-r","--name-only",commit],capture_output=True,text=True).stdout.split() if f.endswith(".py") and f.split("/")[0] in PK]
        def get(f): return subprocess.run(["git","show",f"{commit}:{f}"],capture_output=True,text=True).stdout
    else:
        names=[str(p) for k in PK for p in pathlib.Path(k).rglob("*.py")]
        def get(f): return pathlib.Path(f).read_text()
    return names,get
rows=list(csv.DictReader(open(sys.argv[1]),delimiter="\t",quoting=csv.QUOTE_NONE)); base=sys.argv[2]
names,get=index(); now={}
for f in names:
    for d in defs(get(f),f): now.setdefault(d[0],[]).append((f,)+d[1:])
bnames,bget=index(base); bset=set(bnames); cache={}
def base_defs(f):
    if f not in cache: cache[f]=defs(bget(f),f) if f in bset else []
    return cache[f]
ok,bad=[],[]
for i,r in enumerate(rows):
    k,o,n=r["kind"],r["old"],r["new"]
    if k not in("class","function","field") or n=="DELETE" or o==n: continue
    name=o.split(".")[-1]; owner=o.rsplit(".",1)[0] if "." in o else None
    new=n.split(".")[-1]
    if name==new: continue
    if k=="field":
        C={"supervision":"SupervisionConfig"}.get(owner,owner.title()+"Config"); c=[x for x in now.get(name,[]) if x[0].startswith("configs/") and x[1]==C and x[2]=="const"]
        (ok if len(c)==1 else bad).append((r,c)); continue
    b=[x for x in base_defs(r["where"]) if x[0]==name and (owner is None or x[1].split(".")[0]==owner or x[1]==owner) and (k!="class" or x[2]=="class")]
    note=r["note"] or ""
    c=[x for x in now.get(name,[]) if (k!="class" or x[2]=="class")]
    if not b: bad.append((r,c)); continue
    order={"class":0,"function":1,"const":2,"attr":3,"param":4,"local":5}
    if "attribute" in note: b=[x for x in b if x[2] in("attr","const","param")] or b
    elif "parameter" in note: b=[x for x in b if x[2]=="param"] or b
    b.sort(key=lambda x:order[x[2]]); kind=b[0][2]
    if kind in("param","local"): # all of them in that file of the same kind
        c=[x for x in c if x[2] in(kind,)]
        hit=[x for x in c if any(difflib.SequenceMatcher(None,x[5],y[5],autojunk=False).ratio()>.6 for y in b)]
        if hit: ok.append((r,hit))
        else: bad.append((r,c))
        continue
    c=[x for x in c if x[2]==kind]
    sc=[(difflib.SequenceMatcher(None,x[5],b[0][5],autojunk=False).ratio(),x) for x in c]
    if kind=="attr": sc=[(s+(1 if x[1]==b[0][1] else 0),x) for s,x in sc]
    sc.sort(key=lambda z:-z[0])
    if sc and sc[0][0]>.5: ok.append((r,[sc[0][1]]))
    else: bad.append((r,c))
json.dump([dict(kind=r["kind"],old=r["old"],new=r["new"],where=r["where"],note=r["note"] or "",at=[dict(file=x[0],owner=x[1],what=x[2],line=x[3],col=x[4]) for x in c]) for r,c in ok],open("refactoring/targets.json","w"),indent=0)
print(len(ok),"resolved",file=sys.stderr)
for r,c in bad: print(r["kind"],r["old"],"->",r["new"],r["where"],"|",[(x[0],x[1],x[2],x[3]+1) for x in c][:4],file=sys.stderr)
