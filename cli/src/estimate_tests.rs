use burn_megatron::comm::World;

use super::*;

fn ranks(world: usize, own_rank: Option<usize>, on_this_machine: usize) -> RankSetup {
    RankSetup {
        world: World::threads(world).unwrap(),
        own_rank,
        local_rank: 0,
        on_this_machine,
        engine: burn_megatron::comm::Engine::Threads,
    }
}

fn estimates(text: &str) -> (ParallelPlan, RankEstimates) {
    let recipe = crate::recipe::parsed(text).unwrap();
    let plan = recipe.plan().unwrap();
    let estimates = RankEstimates::new(&recipe, &plan, &Device::flex()).unwrap();
    (plan, estimates)
}

/// Pipeline whose first rank has the embedding, and whose last rank has the output layer and the logits.
const PIPELINE: &str = "
[parallel]
tensor = 2
pipeline = 2
[model]
layers = 2
vocabulary = 1000
tied = false
[train]
micro_batch_size = 2
global_batch_size = 8
[data_parallel]
precision = \"bf16\"
";

#[test]
fn each_rank_needs_what_its_stages_hold() {
    let (_, found) = estimates(PIPELINE);
    let logits = |rank: usize| found.ranks[rank].need.logits;
    assert_eq!((logits(0), logits(1)), (0, 2 * 128 * 500 * 2));
    let (_, chunked) = estimates(&format!("{PIPELINE}[kernels]\nloss_chunk_size = 100"));
    assert_eq!(chunked.ranks[1].need.logits, 100 * 500 * 2);
    for rank in &found.ranks {
        let memory = &rank.sharing.memory;
        assert_eq!(rank.need.parameters, u128::from(memory.parameters));
        assert_eq!(rank.need.gradients, u128::from(memory.gradients));
        assert_eq!(rank.need.optimizer, u128::from(memory.optimizer));
        // Weights in 16 bits; gradients, master weights and two moments in 32 bits.
        assert_eq!(memory.optimizer, 6 * memory.parameters);
    }
    let whole = Recipe::default();
    let plan = whole.plan().unwrap();
    let whole = RankEstimates::new(&whole, &plan, &Device::flex()).unwrap();
    assert_eq!(whole.first().parameters, whole.parameters);
}

#[test]
fn ranks_of_a_machine_count_together_and_each_in_its_cgroup() {
    let (plan, found) = estimates(PIPELINE);
    let need = |rank: usize| u64::try_from(found.ranks[rank].need.total()).unwrap();
    let least = need(0).min(need(1));
    let all = 2 * (need(0) + need(1));
    let limit = |bytes| {
        Some(MemoryLimit {
            bytes,
            of: "this machine",
        })
    };
    let check = |ranks: RankSetup, machine, cgroup| {
        let memory = HostMemory {
            machine: limit(machine),
            cgroup: limit(cgroup),
        };
        found.check_in(&plan.mesh, &ranks, memory).is_ok()
    };
    // Ranks that are threads are all on this machine.
    assert!(check(ranks(4, None, 4), all, all));
    assert!(!check(ranks(4, None, 4), all - 1, all));
    assert!(!check(ranks(4, None, 4), all, all - 1));
    // Two of four processes: the two that need the least memory count, because their ranks are unknown.
    assert!(check(ranks(4, Some(3), 2), 2 * least, need(1)));
    assert!(!check(ranks(4, Some(3), 2), 2 * least - 1, need(1)));
    assert!(!check(ranks(4, Some(3), 2), all, need(1) - 1));
    let none = HostMemory {
        machine: None,
        cgroup: None,
    };
    assert!(found.check_in(&plan.mesh, &ranks(4, None, 4), none).is_ok());
}

/// Checks that no allocation has the size of a model that no machine can hold.
#[cfg(target_os = "linux")]
#[test]
fn a_model_beyond_all_memory_is_outlined_and_refused() {
    let (plan, found) = estimates(
        "[model]\nhidden = 1048576\nheads = 1024\nlayers = 40\ncontext = 4194304\n\
         positions = { rotary = { base = 10000.0 } }\n[train]\nmicro_batch_size = 16\n",
    );
    assert!(found.parameters > 500_000_000_000_000);
    let error = found
        .check(&plan.mesh, &ranks(1, None, 1), DeviceKind::Cpu)
        .unwrap_err();
    let error = error.to_string();
    assert!(error.starts_with("the run needs at least "), "{error}");
    assert!(
        error.ends_with("; --ignore-memory skips this check"),
        "{error}"
    );
    assert_eq!(error.lines().count(), 1);
}

#[test]
fn settings_of_attention_logits_are_refused_before_a_model_is_built() {
    let checked = |text: &str| {
        let recipe = crate::recipe::parsed(text).unwrap();
        check_names(&recipe, &Device::flex()).map_err(|error| error.to_string())
    };
    assert_eq!(checked("[train.qk_clip]"), Ok(()));
    for (text, says) in [
        (
            "[model]\nfamily = 'qwen3'\n[train.qk_clip]",
            "queries and keys are normalized",
        ),
        (
            "[train.qk_clip]\n[lora]\ntarget_modules = ['down_proj']",
            "qk_clip has no weights to scale",
        ),
        (
            "[train]\nfreeze = ['**.attention.**']\n[train.qk_clip]",
            "qk_clip has no weights to scale",
        ),
    ] {
        let error = checked(text).unwrap_err();
        assert!(error.contains(says), "{text}: {error}");
    }
    assert_eq!(
        checked("[train]\nlog_max_attention_logit = true\n[model]\nfamily = 'qwen3'"),
        Ok(())
    );
}
