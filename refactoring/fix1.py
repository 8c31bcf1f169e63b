import re,pathlib,subprocess,tokenize,io,json,csv
files=[f for f in subprocess.run(['git','ls-files'],capture_output=True,text=True).stdout.split('\n') if f]
for f in files:
    p=pathlib.Path(f)
    if p.is_symlink() or not p.is_file(): continue
    try: s=p.read_text()
    except UnicodeDecodeError: continue
    o=s
    if 'FILE_VARIABLE' in s:
        if f.endswith('.py'):
            L=s.split('\n'); keep=set()
            for t in tokenize.generate_tokens(io.StringIO(s).readline):
                if t.type==tokenize.NAME and t.string=='FILE_VARIABLE': keep.add(t.start)
            for i,l in enumerate(L):
                for m in reversed(list(re.finditer('FILE_VARIABLE',l))):
                    if (i+1,m.start()) not in keep and not re.search(r'liveness\.FILE_VARIABLE|\{FILE_VARIABLE',l): l=l[:m.start()]+'FILE'+l[m.end():]
                L[i]=l
            s='\n'.join(L)
        else: s=s.replace('FILE_VARIABLE','FILE')
    s=s.replace('medium: HangDetectorState','medium: Memory')
    if f.startswith('tests/integration/network'): s=s.replace('`SourceContext','`Setting')
    if f=='tests/bench/cluster/said.py': s=s.replace('in_progress','is_out')
    if f.startswith('tests/launch/tools/plan/control_plane'): s=s.replace('sequences_per_engine','part_of')
    if f.startswith('tests/bench/faults'): s=s.replace('SourceMissingError','NotThereError')
    if f.startswith('tests/bench/faults') : s=s.replace('RETRY_INTERVAL_S','_AGAIN_S')
    if s!=o: p.write_text(s)
F={}
for r in csv.DictReader(open('refactoring/NAMES.tsv'),delimiter='\t',quoting=csv.QUOTE_NONE):
    if r['kind']=='field' and r['old']!=r['new']: F.setdefault(r['old'].split('.')[0],{})[r['old'].split('.')[1]]=r['new'].split('.')[1]
def walk(x,parent=None):
    if isinstance(x,dict):
        m=F.get(parent,{}); return {m.get(k,k):walk(v,k) for k,v in x.items()}
    if isinstance(x,list): return [walk(v,parent) for v in x]
    return x
for p in pathlib.Path('tests/bench/results').glob('*.json'):
    s=p.read_text(); j=json.loads(s); k=walk(j)
    if k!=j:
        ind=1 if s.startswith('{\n "') else (2 if s.startswith('{\n  "') else None)
        out=json.dumps(k,indent=ind)+('\n' if s.endswith('\n') else '')
        same=json.dumps(j,indent=ind)+('\n' if s.endswith('\n') else '')==s
        print(p,'format same',same)
        p.write_text(out)
