import json,tokenize,io,pathlib,collections
T=json.load(open('refactoring/targets.json')); skip=set(open('refactoring/skip.txt').read().split())
M=collections.defaultdict(set)
for t in T:
    if t['old'] in skip or t['kind']=='class': continue
    M[t['old'].split('.')[-1]].add(t['new'])
G={'join','close','end','add','apply','at','has','after','how','place','told','work','settle','books','beat','retry_s','places','pieces'}
for root in ('tests','learner','actor','bridge','configs','launch'):
    for p in pathlib.Path(root).rglob('*.py'):
        s=p.read_text(); toks=list(tokenize.generate_tokens(io.StringIO(s).readline))
        for i,t in enumerate(toks):
            if t.type==tokenize.NAME and t.string in M and t.string not in G and i and toks[i-1].string=='.' : print(f"{t.string}\t{'|'.join(M[t.string])}\t{p}:{t.start[0]}\t{t.line.strip()[:110]}")
