import json,re,pathlib,subprocess,tokenize,io,collections,csv,sys
T=json.load(open('refactoring/targets.json')); skip=set(open('refactoring/skip.txt').read().split())
M=collections.defaultdict(set); Q={}
for t in T:
    if t['old'] in skip: continue
    M[t['old'].split('.')[-1]].add(t['new'].split('.')[-1])
    if '.' in t['old'] and t['kind']!='field': Q[t['old']]=t['new']
for l in open('refactoring/stage2.tsv'):
    r=l.rstrip('\n').split('\t')
    if len(r)>1 and r[1] and not (len(r)>2 and r[2]): M[r[0]].add(r[1])
cnt=collections.Counter()
for root in ('learner','actor','bridge','configs','launch'):
    for p in pathlib.Path(root).rglob('*.py'):
        for t in tokenize.generate_tokens(io.StringIO(p.read_text()).readline):
            if t.type==tokenize.NAME: cnt[t.string]+=1
cls={t['old']:None for t in T if t['kind']=='class'}
word={o:next(iter(n)) for o,n in M.items() if len(n)==1 and cnt[o]==0 and (('_' in o.strip('_')) or re.match(r'_?[A-Z][a-z]+[A-Z]',o))}
tick={o:next(iter(n)) for o,n in M.items() if len(n)==1 and cnt[o]==0 and o not in word and re.match(r'_?[A-Z]',o)}
print('tick',sorted(tick)); print('word',len(word))
SKIPW={'cut_off','set_aside','give_back','give_up','place_at','place_of'}
word={k:v for k,v in word.items() if k not in SKIPW}
fields={}; metrics={}
for r in csv.DictReader(open('refactoring/NAMES.tsv'),delimiter='\t',quoting=csv.QUOTE_NONE):
    if r['kind']=='field' and r['old']!=r['new']: fields[r['old']]=r['new']
    if r['kind']=='metric' and r['old']!=r['new'] and '*' not in r['old']: metrics[r['old']]=r['new']
wre=re.compile(r'(?<![A-Za-z0-9_])('+'|'.join(sorted(map(re.escape,word),key=len,reverse=True))+r')(?![A-Za-z0-9_])')
fre=re.compile(r'(?<![A-Za-z0-9_])('+'|'.join(sorted(map(re.escape,fields),key=len,reverse=True))+r')(?![A-Za-z0-9_])')
mre=re.compile(r'(?<![A-Za-z0-9_/])('+'|'.join(sorted(map(re.escape,metrics),key=len,reverse=True))+r')(?![A-Za-z0-9_])')
qre=re.compile(r'(?<![A-Za-z0-9_])('+'|'.join(sorted(map(re.escape,Q),key=len,reverse=True))+r')(?![A-Za-z0-9_])')
tre=re.compile(r'(?<![A-Za-z0-9_])('+'|'.join(sorted(map(re.escape,tick),key=len,reverse=True))+r')(?![A-Za-z0-9_])')
log=open('refactoring/text.log','w'); num=collections.Counter()
for f in subprocess.run(['git','ls-files'],capture_output=True,text=True).stdout.split('\n'):
    if not f or f.startswith('.ci'): continue
    p=pathlib.Path(f)
    if p.is_symlink() or not p.is_file(): continue
    try: s=p.read_text()
    except UnicodeDecodeError: continue
    def sub(rx,m,kind):
        def g(x):
            num[kind]+=1; log.write(f"{kind}\t{f}\t{x.group(0)}\t{s[max(0,x.start()-40):x.end()+30]!r}\n"); return m[x.group(1)]
        return g
    o=s
    s=fre.sub(sub(fre,fields,'field'),s); s=mre.sub(sub(mre,metrics,'metric'),s); s=qre.sub(sub(qre,Q,'qual'),s); s=wre.sub(sub(wre,word,'word'),s)
    # CamelCase words within backticks
    def bt(x):
        inner=x.group(0); new=tre.sub(lambda y:tick[y.group(1)],inner)
        if new!=inner: num['tick']+=1; log.write(f"tick\t{f}\t{inner}\t{new}\n")
        return new
    s=re.sub(r'`[^`\n]{1,60}`',bt,s)
    if s!=o: p.write_text(s)
print(num)
