"""Names, units and meanings of all metrics."""

import fnmatch

LAST_EPOCH = "last_epoch/{}"
"""Name of a metric of the last epoch over an update's batch; other metrics of the row are of the first epoch."""
SHOWN_OF_LAST_EPOCH = (
    "loss",
    "grad_norm",
    "entropy",
    "clip_fraction",
    "ratio/mean",
    "ratio/p01",
    "ratio/p50",
    "ratio/p99",
    "ess",
    "mismatch_kl",
    "reference_kl",
)
"""Metrics that earlier epochs may change; written only if rounds.epochs > 1."""


METRICS: dict[str, str] = {
    # name: unit and meaning
    "reward/mean": "mean reward of the update's rollouts",
    "real_tokens": "prompt and response tokens, observed ones too, computed in this step",
    "reward/std": "standard deviation of the update's rewards",
    "reward/min": "smallest reward of the update's rollouts",
    "reward/max": "largest reward of the update's rollouts",
    "reward/zero_variance_groups": "fraction of groups of which no response trains, or whose rewards (with turn_grpo "
    "the returns of whose turns) are all alike",
    "reward/overlong_penalty": "mean of what the soft overlong penalty added to the rewards, 0 or less; where it is on",
    "reward/length_penalty": "mean of what the length penalty added to the rewards, either way; where it is on",
    "verdicts/ok": "verdicts of the update's responses by which they earn something; each verifier's counted",
    "verdicts/wrong": "verdicts by which they earn nothing, likewise",
    "verdicts/timeout": "verdicts of code that ran out of time, which earns nothing (RollPacker section 4.3), likewise",
    "verdicts/hang": "verdicts after the verifier hung on the answer each time, which earns nothing, likewise",
    "verdicts/unscored": "responses whose task has verifiers of which none was asked, as where they were cut off",
    "turns/mean": "turns, mean over the update's episodes; where there are any",
    "turns/reward": "mean over the update's episodes of the sum of their turns' rewards; where there are any",
    "response/mean_tokens": "tokens, mean response length in sampled tokens; what an episode observed doesn't count",
    "response/max_tokens": "tokens, longest response, likewise",
    "response/observation_tokens": "tokens, mean of what the update's responses observed; where any did",
    "response/thinking_tokens": "tokens, mean over the update's responses of what they think, marks included",
    "response/thinking_unfinished": "fraction of the update's responses that end within their thinking",
    "response/truncated": "fraction of the update's responses that a limit of tokens or turns cut off",
    "loss": "nats, the objective as normalised",
    "entropy": "nats, mean over trained tokens",
    "grad_norm": "global norm before clipping",
    "learning_rate": "per step",
    "ess": "effective sample size over tokens, 0 to 1 (PipelineRL eq. 6)",
    "ess_sequence": "effective sample size over sequences, 0 to 1",
    "lag/mean": "steps, mean over trained tokens",
    "lag/max": "steps, oldest trained token",
    "lag/fraction_0": "fraction of trained tokens of lag 0",
    "lag/fraction_1": "fraction of trained tokens of lag 1",
    "lag/fraction_2-3": "fraction of trained tokens of lag 2 or 3",
    "lag/fraction_4-7": "fraction of trained tokens of lag 4 to 7",
    "lag/fraction_8_up": "fraction of trained tokens of lag 8 and more",
    "lag/ess_0": "effective sample size over the tokens of lag 0, 0 to 1; NaN if there is none",
    "lag/ess_1": "effective sample size over the tokens of lag 1, 0 to 1; NaN if there is none",
    "lag/ess_2-3": "effective sample size over the tokens of lag 2 or 3, 0 to 1; NaN if there is none",
    "lag/ess_4-7": "effective sample size over the tokens of lag 4 to 7, 0 to 1; NaN if there is none",
    "lag/ess_8_up": "effective sample size over the tokens of lag 8 and more, 0 to 1; NaN if there is none",
    "mismatch_kl": "nats, mean of log mu - log pi (k1)",
    "mismatch_kl_k3": "nats, Schulman's k3 estimate of KL(mu, pi), linear where pi / mu passes e^20",
    "reference_kl": "nats, mean of the configured KL estimate against the reference; 0 without one",
    "max_abs_dlogprob": "nats, largest |log pi - log mu|",
    "max_abs_dlogprob_lag0": "nats, the same over tokens of the current weights: engine against learner",
    "clip_fraction": "fraction of trained tokens whose ratio was clipped or truncated",
    "ratio/mean": "mean of pi / mu over trained tokens",
    "ratio/p01": "1st percentile of pi / mu over trained tokens, to 1% of its logarithm",
    "ratio/p50": "median of pi / mu over trained tokens, to 1% of its logarithm",
    "ratio/p99": "99th percentile of pi / mu over trained tokens, to 1% of its logarithm",
    "tokens": "tokens trained in this step",
    "sequences": "sequences trained in this step",
    "skipped_updates": "optimizer steps left out so far because loss or gradient was not finite",
    "skipped_in_a_row": "optimizer steps left out since the last one that was not",
    "num_compilations": "times that accumulate and apply were traced and compiled so far; 2 if there is one shape",
    "tokens_per_s": "real tokens the learner trained per second of wall time, each counted once",
    "model_tflops_per_s": "10^12 model FLOPs a second that the learner computed, all chips together",
    "mfu": "model FLOPs utilisation: model FLOPs a second over the chips' peak; NaN where the peak is unknown",
    "packing/fill": "real tokens per computed token",
    "groups/dropped": "groups kept out so far, whatever the reason",
    "groups/reissued": "tickets offered again so far",
    "groups/unreadable": "groups so far that could not be read, or were not what their row in the store said",
    "groups/stale": "groups over the lag bound so far",
    "groups/below_min_version": "groups so far with tokens of older weights than their ticket allows",
    "groups/zero_variance": "groups without signal so far that another prompt replaced",
    "groups/overflow": "groups so far that gave way to newer ones",
    "groups/wrong_size": "groups refused so far: another number of responses than the ticket asks for",
    "groups/out_of_vocabulary": "groups refused so far: a token id outside the model's vocabulary",
    "groups/too_long": "groups refused so far: a response over its token limit, or over the model's with its prompt",
    "groups/future_version": "groups refused so far: weights newer than the learner's",
    "groups/impossible_logprob": "groups refused so far: a behaviour logprob that no sampled token can have",
    "groups/extreme_reward": "groups refused so far: a reward too large for float32 advantages",
    "window/blocked_by_queue": "times so far that waiting complete groups began to keep tickets from being issued",
    "window/blocked_by_lag": "times so far that the async ratio or the lag bound did",
    "ess_stops": "updates so far that were not made because the batch's ESS was below the floor",
    "time/step_s": "seconds since the step before",
    "time/train_s": "seconds the learner computed in this step",
    "time/wait_s": "seconds the learner waited for groups in this step",
    "time/publish_s": "seconds from the hand-over of the version that came out last until it was out (buckets apart)",
    "time/publish_blocked_s": "seconds of the last publish in which the learner could not go on",
    "publish/late": "publishes so far that were due before the one before was out",
    "publish/replaced": "versions so far that gave way to the next before they were begun (publish.when_late=replace)",
    "publish/destination_failures": "times so far that a version could not be put into a place that it goes to besides",
    "publish/destination_replaced": "versions so far that a newer one kept from a slow place, such as a bucket",
    "checkpoint/failed": "checkpoints so far that could not be saved, as on a full disk",
    "actor/pause_s": "seconds generation stood still in the actors' last weight update",
    "actor/load_s": "seconds of that spent loading",
    "actor/prefetch_s": "seconds the copy before it took, while generating",
    "actor/discarded_tokens": "tokens that live actors sampled so far and no group has: races, restarts, in progress",
    "actor/verifier_failures": "times so far that a live actor's verifier failed or hung, though a retry may have done",
    "actor/episode_failures": "times so far that a live actor's environment failed or hung, likewise",
    "actor/dropped_groups": "groups so far that live actors gave up, as a response could not be judged, or played",
    "actor/judge_retries": "requests so far of live actors' judge that failed and were followed by another",
    "actor/judge_failures": "responses so far that live actors' judge could not score",
    "actor/episode_failures/deadline": "those of them that were an environment that took too long",
    "actor/episode_failures/crash": "those of them that were a process that broke down",
    "actor/episode_failures/exception": "those of them that were an environment that raised",
    "actor/episode_failures/reply": "those of them that were an answer that is none (too large, no step, no reward)",
    "actor/episode_failures/start": "those that were an environment not to be started, or a row not to be sent",
    "round/is_long": "1 for a round of the long-prompt queue, 0 for any other",
    "round/long_queue": "prompts in the long-prompt queue at the round's end",
    "round/waiting_ratio_eq4": "trainer's wait until a round has U complete groups, over the round (RolloutPipe eq. 4)",
    "round/waiting_ratio": "wait / (wait + compute) over a round (RolloutPipe section 5.1)",
    "round/wait_s": "seconds of a round the learner waited for groups, less what was set aside (publishing, probes)",
    "round/compute_s": "seconds of a round the learner computed",
    "round/rollout_to_train_end_s": "seconds from a round's first ticket to its last step",
    "round/first_dispatch_s": "seconds from a round's first ticket until its first U groups are there",
    "round/first_group_s": "seconds from a round's first ticket to its first training",
    "eval/reward": "mean reward on the held-out problems",
    "eval/reward_stderr": "standard error of eval/reward, clustered by problem; NaN of one problem",
    "eval/unscored_problems": "held-out problems that nobody could make a group for; eval/reward is without them",
    "eval/version": "step of the oldest weights behind the evaluation",
    "eval/last_version": "step of the newest; eval/version's unless weights were published meanwhile",
    "eval/response_tokens": "tokens, mean response length in evaluation, in sampled tokens",
    "eval/thinking_tokens": "tokens, mean over the evaluation's responses of what they think, marks included",
    "eval/thinking_unfinished": "fraction of the evaluation's responses that end within their thinking",
    "eval/truncated": "fraction of the evaluation's responses that a limit of tokens or turns cut off",
    "eval/turns": "turns, mean over the evaluation's episodes; where there are any",
    "prompts/epoch": "problems asked so far over the rows of their file; of a mixture the largest of its files'",
    "prompts/bad_rows": "malformed rows so far among those made by index; set aside in quarantine.jsonl",
    "prompts/too_long_rows": "the same of rows whose prompts were too long, or empty",
    "parity/max_abs_dlogprob": "nats, engine against learner on a probe right after a publish",
}
FAMILIES: dict[str, str] = {
    # `*` is the name of a source in prompts.mixture
    "prompts/*/epoch": "problems asked of a source's rows so far, over its rows",
    "prompts/*/fraction": "fraction of the problems that are of a source now, by its weight and the curriculum",
    "prompts/*/problems": "problems asked of a source so far",
    "prompts/*/reward": "running mean reward of a source's groups (prompts.curriculum_groups)",
    # `*` is the name of a verifier
    "rewards/?*": "mean score of the verifier so named, before it is weighted, over the update's responses it judged",
    "eval/rewards/?*": "the same over the evaluation's responses",
    # `*` is the name of an evaluation set; `@k` is the number of samples (docs/evaluation.md)
    "eval/?*/rewards/?*": "the same over the responses of an evaluation set",
    "eval/?*/avg@*_stderr": "standard error of the estimate so named, clustered by problem; NaN of one problem",
    "eval/?*/pass@*_stderr": "likewise",
    "eval/?*/maj@*_stderr": "likewise",
    "eval/?*/avg@*": "mean reward over a set's problems and their k samples",
    "eval/?*/pass@*": "chance that of so many samples of a problem one passes (evaluation.pass_reward), unbiased",
    "eval/?*/maj@*": "fraction of a set's problems whose most frequent answer of k samples passes",
    "eval/?*/unscored_problems": "problems of a set that nobody could make a group for",
    "eval/?*/version": "step of the oldest weights behind a set's evaluation",
    "eval/?*/last_version": "step of the newest",
    "eval/?*/response_tokens": "tokens, mean response length over a set, in sampled tokens",
    "eval/?*/thinking_tokens": "tokens, mean over a set's responses of what they think, marks included",
    "eval/?*/thinking_unfinished": "fraction of a set's responses that end within their thinking",
    "eval/?*/truncated": "fraction of a set's responses that a limit of tokens or turns cut off",
    "eval/?*/turns": "turns, mean over a set's episodes; where there are any",
}
"""Units and meanings of metrics with one instance per source, verifier or evaluation set."""
METRICS |= {
    LAST_EPOCH.format(name): f"{METRICS[name]}; in the last pass over the batch" for name in SHOWN_OF_LAST_EPOCH
}


ABOUT: dict[str, str] = {
    "kind": "step, eval (of the held-out problems), eval/SET (of another set), round or probe",
    "step": "optimizer step that the row belongs to; an evaluation's is the step of its weights",
    "incarnation": "start of the learner that wrote it, from 0",
    "time_s": "Unix seconds at which it was written; rows of older versions have none",
}
"""Units and meanings of the fields of each row of metrics.jsonl that are not metrics."""


TIMINGS = (
    "time/step_s",
    "time/train_s",
    "time/wait_s",
    "time/publish_s",
    "time/publish_blocked_s",
    "publish/late",
    "publish/replaced",
    "publish/destination_replaced",
    "tokens_per_s",
    "model_tflops_per_s",
    "mfu",
)
"""Metrics that may differ between two runs of the same stream."""


def meaning(name: str) -> str | None:
    """Returns unit and meaning of a metric, or None if the name is unknown."""
    if name in METRICS:
        return METRICS[name]
    return next((said for family, said in FAMILIES.items() if fnmatch.fnmatchcase(name, family)), None)
