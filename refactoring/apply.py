"""Applies edits.json. Leaves refactoring/left.tsv: old names of which tokens remain."""
import json, pathlib, sys, tokenize, io, collections
T=json.load(open('refactoring/targets.json')); R=json.load(open('refactoring/edits.json')); skip=set(open('refactoring/skip.txt').read().split())
edits={}; conflicts=[]
for t in T:
    if t['old'] in skip: continue
    o,n=t['old'].split('.')[-1],t['new'].split('.')[-1]
    for a in t['at']:
        for f,l,c,e in R.get(f"{a['file']}:{a['line']}:{a['col']}",[])+[[a['file'],a['line'],a['col'],a['col']+len(o)]]:
            if f.startswith('.venv') or f.startswith('/') or f.startswith('file:'): print('outside',f,o); continue
            prev=edits.setdefault(f,{}).get((l,c))
            if prev and prev!=(e,o,n): conflicts.append((f,l+1,prev,(e,o,n)))
            edits[f][(l,c)]=(e,o,n)
num=0
for f,E in edits.items():
    p=pathlib.Path(f); L=p.read_text().split('\n')
    for (l,c),(e,o,n) in sorted(E.items(),reverse=True):
        have=L[l][c:e]
        if have!=o: print('differs',f,l+1,have,o,n); continue
        L[l]=L[l][:c]+n+L[l][e:]; num+=1
    p.write_text('\n'.join(L))
print(num,'edits',len(edits),'files'); 
for c in conflicts: print('conflict',c)
old=collections.defaultdict(set)
for t in T:
    if t['old'] not in skip: old[t['old'].split('.')[-1]].add(t['new'].split('.')[-1])
cnt={o:[0,0] for o in old}; where=collections.defaultdict(list)
for k,root in ((0,('learner','actor','bridge','configs','launch')),(1,('tests','docs'))):
    for r in root:
        for p in pathlib.Path(r).rglob('*.py'):
            try:
                for tok in tokenize.generate_tokens(io.StringIO(p.read_text()).readline):
                    if tok.type==tokenize.NAME and tok.string in cnt: cnt[tok.string][k]+=1; where[tok.string].append(f"{p}:{tok.start[0]}")
            except Exception as x: print('tokenize',p,x)
with open('refactoring/left.tsv','w') as h:
    for o in sorted(cnt): h.write(f"{o}\t{'|'.join(sorted(old[o]))}\t{cnt[o][0]}\t{cnt[o][1]}\t{' '.join(where[o][:6])}\n")
