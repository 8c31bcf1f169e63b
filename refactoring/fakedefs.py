import json,re,subprocess,pathlib
t=json.load(open('refactoring/targets.json'))
prod=""
for d in ('learner','actor','bridge','configs','launch'):
    for p in pathlib.Path(d).rglob('*.py'): prod+=p.read_text()+"\n"
tests={p:p.read_text() for p in pathlib.Path('tests').rglob('*.py')}
seen=set()
for x in t:
    o=x['old'].split('.')[-1]
    if o in seen or x['kind']=='class': continue
    seen.add(o)
    for p,s in tests.items():
        for m in re.finditer(rf'(def {re.escape(o)}\(|\.{re.escape(o)}\b|"{re.escape(o)}"| {re.escape(o)}=)',s):
            if m.group(0).startswith('def') or (m.group(0).startswith('.') and not re.search(rf'(def {re.escape(o)}\(|\b{re.escape(o)}\b *[:=])',prod+s)):
                line=s[:m.start()].count('\n')+1
                print(x['old'],'->',x['new'],f'{p}:{line}',s.splitlines()[line-1].strip()[:110])
