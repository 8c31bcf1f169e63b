import subprocess,json,pathlib,re,io,tokenize
for _ in range(12):
    out=json.loads(subprocess.run(['.venv/bin/ruff','check','--select','E501','--output-format','json','.'],capture_output=True,text=True).stdout)
    done=0; seen=set()
    for e in out:
        f=e['filename']; row=e['location']['row']
        if f in seen: continue
        p=pathlib.Path(f); s=p.read_text(); L=s.split('\n'); line=L[row-1]
        # inside triple-quoted string or comment?
        tok=None
        for t in tokenize.generate_tokens(io.StringIO(s).readline):
            if t.type==tokenize.STRING and t.start[0]<=row<=t.end[0] and t.end[0]>=t.start[0] and t.string.lstrip('rbfRBF').startswith('"""'): tok=t
            if t.type==tokenize.COMMENT and t.start[0]==row and not L[row-1][:t.start[1]].strip(): tok=t
        if tok is None: continue
        cut=line.rfind(' ',0,121)
        if cut<=len(line)-len(line.lstrip()): continue
        a,b=line[:cut].rstrip(),line[cut+1:]
        ind=re.match(r'\s*',line).group(0)
        if tok.type==tokenize.COMMENT:
            nxt=L[row] if row<len(L) else ''
            if nxt.startswith(ind+'# '): L[row-1:row+1]=[a,ind+'# '+b+' '+nxt[len(ind)+2:]]
            else: L[row-1:row]=[a,ind+'# '+b]
        else:
            last=row==tok.end[0]
            nxt=L[row] if not last else ''
            ni=re.match(r'\s*',nxt).group(0)
            # arg description continuation is indented by 2 more
            isarg=re.match(r'\s*[\w*`, ()]+: ',line) and len(ind)>=6
            if last: L[row-1:row]=[a,ind+('  ' if isarg else '')+b]
            elif nxt.strip() and not re.match(r'\s*([*\-|]|\d+\.|[\w`]+: |"""|Args:|Raises:|Returns:)',nxt) and (ni==ind or (isarg and len(ni)==len(ind)+2) or ind=='' ):
                L[row-1:row+1]=[a,ni+b+' '+nxt.lstrip()]
            else: L[row-1:row]=[a,ind+('  ' if isarg or line.lstrip().startswith(('* ','- ')) else '')+b]
        p.write_text('\n'.join(L)); seen.add(f); done+=1
    if not done: break
