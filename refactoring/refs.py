"""Asks pyright's language server for the references of each target. refs.py targets.json > edits.json"""
import json, os, pathlib, subprocess, sys, threading, queue, time
root=pathlib.Path.cwd(); T=json.load(open(sys.argv[1])); out=sys.argv[2]
done={}
if os.path.exists(out): done=json.load(open(out))
p=subprocess.Popen([".venv/bin/pyright-langserver","--stdio"],stdin=subprocess.PIPE,stdout=subprocess.PIPE,stderr=subprocess.DEVNULL)
Q={}; 
def send(o):
    b=json.dumps(o).encode(); p.stdin.write(b"Content-Length: %d\r\n\r\n"%len(b)+b); p.stdin.flush()
def reader():
    while True:
        n=0
        while True:
            l=p.stdout.readline()
            if not l: return
            if l==b"\r\n": break
            if l.lower().startswith(b"content-length"): n=int(l.split(b":")[1])
        m=json.loads(p.stdout.read(n))
        if "method" in m and "id" in m:
            if m["method"]=="workspace/configuration": send({"jsonrpc":"2.0","id":m["id"],"result":[{} for _ in m["params"]["items"]]})
            else: send({"jsonrpc":"2.0","id":m["id"],"result":None})
        elif "id" in m and m["id"] in Q: Q[m["id"]].put(m)
threading.Thread(target=reader,daemon=True).start()
c=0
def ask(method,params,timeout=900):
    global c; c+=1; i=c; Q[i]=queue.Queue(); send({"jsonrpc":"2.0","id":i,"method":method,"params":params}); return Q[i].get(timeout=timeout)
uri=lambda f:(root/f).as_uri()
ask("initialize",{"processId":os.getpid(),"rootUri":root.as_uri(),"workspaceFolders":[{"uri":root.as_uri(),"name":"r"}],"capabilities":{"workspace":{"configuration":True,"workspaceFolders":True}}})
send({"jsonrpc":"2.0","method":"initialized","params":{}})
opened=set()
t0=time.time()
for k,t in enumerate(T):
    for a in t["at"]:
        key=f'{a["file"]}:{a["line"]}:{a["col"]}'
        if key in done: continue
        if a["file"] not in opened:
            opened.add(a["file"]); send({"jsonrpc":"2.0","method":"textDocument/didOpen","params":{"textDocument":{"uri":uri(a["file"]),"languageId":"python","version":1,"text":(root/a["file"]).read_text()}}})
        r=ask("textDocument/references",{"textDocument":{"uri":uri(a["file"])},"position":{"line":a["line"],"character":a["col"]},"context":{"includeDeclaration":True}})
        res=r.get("result") or []
        done[key]=[[x["uri"].removeprefix(root.as_uri()+"/"),x["range"]["start"]["line"],x["range"]["start"]["character"],x["range"]["end"]["character"]] for x in res]
    if k%25==0: print(k,len(T),f"{time.time()-t0:.0f}s",flush=True); json.dump(done,open(out,"w"))
json.dump(done,open(out,"w"))
p.kill()
