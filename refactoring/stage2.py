import tokenize, io, pathlib, sys
rows=[l.rstrip('\n').split('\t') for l in open('refactoring/stage2.tsv')]
rows=[(r[0],r[1],r[2].split() if len(r)>2 and r[2] else None,False) for r in rows if len(r)>1 and r[1]]
rows+=[(r[0],r[1],r[2].split(),True) for r in (l.rstrip('\n').split('\t') for l in open('refactoring/attrs.tsv'))]
n=0
for root in ('learner','actor','bridge','configs','launch','tests','docs'):
    for p in pathlib.Path(root).rglob('*.py'):
        s=p.read_text(); L=s.split('\n'); toks=list(tokenize.generate_tokens(io.StringIO(s).readline)); ed=[]
        for i,t in enumerate(toks):
            if t.type!=tokenize.NAME: continue
            for o,new,scope,attr in rows:
                if t.string!=o: continue
                if scope and not any(str(p)==x or str(p).startswith(x.rstrip('/')+'/') for x in scope): continue
                if attr:
                    prev=toks[i-1].string; nxt=toks[i+1].string
                    if not(prev=='def' or (prev=='.' and (nxt=='(' or True))): continue
                    if prev=='.' and nxt!='(' : print('attr?',p,t.start[0],L[t.start[0]-1].strip()[:120]); continue
                    if prev=='.' and o in('card','lead','engines') : print('attr',p,t.start[0],L[t.start[0]-1].strip()[:120])
                ed.append((t.start,o,new)); break
        for (l,c),o,new in sorted(ed,reverse=True):
            assert L[l-1][c:c+len(o)]==o; L[l-1]=L[l-1][:c]+new+L[l-1][c+len(o):]
        if ed: p.write_text('\n'.join(L)); n+=len(ed)
print(n)
