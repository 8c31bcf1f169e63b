import re,pathlib,subprocess
files=[f for f in subprocess.run(['git','ls-files'],capture_output=True,text=True).stdout.split('\n') if f and not f.startswith('.ci')]
W=lambda a:re.compile(r'(?<![A-Za-z0-9_])'+a+r'(?![A-Za-z0-9_])')
hang=lambda f:f.startswith(('launch/supervision','launch/tools/deploy','tests/launch/supervision','tests/launch/tools/deploy','tests/bench/faults/site.py','tests/launch/ray','tests/launch/startup/test_engine_start','launch/ray'))
R=[(W('first_beat_s'),'first_heartbeat_timeout_s',lambda f:True),(W('beat_s'),'heartbeat_timeout_s',hang),(W('start_s'),'start_timeout_s',hang),(W('work_s'),'progress_timeout_s',hang),
 (W('place_s'),'placement_timeout_s',lambda f:f.startswith(('launch/ray','tests/launch/ray','docs','launch/README'))),
 (W('_place_s'),'_placement_timeout_s',lambda f:f.startswith(('launch/ray','tests/launch/ray'))),
 (W('_PLACE_S'),'_PLACEMENT_TIMEOUT_S',lambda f:f.startswith(('launch/ray',))),
 (re.compile('SLUICE_PULSE_'),'SLUICE_LIVENESS_',lambda f:True),(re.compile(r'--pulse='),'--liveness_file=',lambda f:True),(re.compile(r'DEFINE_string\("pulse"'),'DEFINE_string("liveness_file"',lambda f:True),
 (re.compile(r'"--pulse" in'),'"--liveness_file" in',lambda f:True),
 (W('_PULSE'),'_LIVENESS_FILE',lambda f:f=='launch/supervision/kubernetes_probe.py'),
 (W('_FIRST_BEAT_S'),'_FIRST_HEARTBEAT_TIMEOUT_S',lambda f:f=='launch/supervision/kubernetes_probe.py'),(W('_BEAT_S'),'_HEARTBEAT_TIMEOUT_S',lambda f:f=='launch/supervision/kubernetes_probe.py'),(W('_START_S'),'_START_TIMEOUT_S',lambda f:f=='launch/supervision/kubernetes_probe.py'),(W('_WORK_S'),'_PROGRESS_TIMEOUT_S',lambda f:f=='launch/supervision/kubernetes_probe.py'),
 (re.compile(r'set_aside\.json'),'gold_failures.json',lambda f:True),(re.compile(r'"set_aside": "gold_failures'),'"gold_failures": "gold_failures',lambda f:True),
 (re.compile(r'last_pass/'),'last_epoch/',lambda f:True),(W('SHOWN_OF_LAST_PASS'),'SHOWN_OF_LAST_EPOCH',lambda f:True),
 (re.compile(r'lag/share_'),'lag/fraction_',lambda f:True),
 (re.compile(r'prompts/(\*|\{name\}|a|b|made|NAME)/share'),r'prompts/\1/fraction',lambda f:True),
 (re.compile(r'eval/(\?\*|\{name\}|aime|SET|NAME)/left_out'),r'eval/\1/unscored_problems',lambda f:True),
 (re.compile(r'window/held_back_by_'),'window/blocked_by_',lambda f:True),(W('_held_back_by'),'_blocked_by',lambda f:f.endswith('window_planner.py')),
 (re.compile(r'"outlet_(failures|replaced)"'),r'"destination_\1"',lambda f:f.startswith('tests/learner')),
]
n={}
for f in files:
    p=pathlib.Path(f)
    if p.is_symlink() or not p.is_file(): continue
    try: s=p.read_text()
    except UnicodeDecodeError: continue
    o=s
    for rx,new,ok in R:
        if ok(f):
            s,k=rx.subn(new,s); n[rx.pattern]=n.get(rx.pattern,0)+k
    if s!=o: p.write_text(s)
for k,v in n.items(): print(v,k)
