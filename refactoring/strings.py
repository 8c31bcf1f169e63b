import json,tokenize,io,pathlib,collections
T=json.load(open('refactoring/targets.json')); skip=set(open('refactoring/skip.txt').read().split())
M=collections.defaultdict(set)
for t in T:
    if t['old'] not in skip: M[t['old'].split('.')[-1]].add(t['new'].split('.')[-1])
for l in open('refactoring/stage2.tsv'):
    r=l.rstrip('\n').split('\t')
    if len(r)>1 and r[1]: M[r[0]].add(r[1])
import ast
for root in ('learner','actor','bridge','configs','launch','tests','docs'):
    for p in pathlib.Path(root).rglob('*.py'):
        for t in tokenize.generate_tokens(io.StringIO(p.read_text()).readline):
            if t.type==tokenize.STRING and not t.string.lower().startswith(('f','rf')):
                try: v=ast.literal_eval(t.string)
                except Exception: continue
                if isinstance(v,str) and v in M: print(f"{p}:{t.start[0]}\t{v}\t{'|'.join(M[v])}\t{t.line.strip()[:110]}")
