use burn_megatron::comm::{Engine, World};

use super::*;

const RECIPE: &str = "
[parallel]
data = 4
[model]
layers = 2
[train]
micro_batch_size = 2
global_batch_size = 16
";

fn threads(ranks: usize) -> RankSetup {
    RankSetup {
        world: World::threads(ranks).unwrap(),
        own_rank: None,
        local_rank: 0,
        on_this_machine: ranks,
        engine: Engine::Threads,
    }
}

#[test]
fn a_run_that_does_not_fit_names_the_kinds_and_what_fits() {
    let recipe = crate::recipe::parsed(RECIPE).unwrap();
    let needed = plan(&recipe).unwrap().fullest().1.peak.total();
    let check = |bytes| {
        let limit = Some(ByteSize(bytes));
        let checked =
            PlannedMemory::new(&recipe).check(&recipe, limit, &threads(4), DeviceKind::Cpu);
        checked.map_err(|error| error.to_string())
    };
    check(needed).unwrap();
    let error = check(needed - 1).unwrap_err();
    for text in [
        "parameters",
        "activations",
        "micro_batch_size = 1",
        "memory.recompute.granularity = \"full\"",
        "memory.offload.optimizer = 1",
        "zero_stage = 1",
        "tensor = 2",
    ] {
        assert!(error.contains(text), "{error}");
    }
    let error = check(1).unwrap_err();
    assert!(
        error.ends_with("tensor, context or pipeline fits"),
        "{error}"
    );
}
/// A pipeline whose last rank has the logits of a large vocabulary.
#[test]
fn ranks_of_a_machine_count_together() {
    let text = "
[parallel]
data = 2
pipeline = 2
[model]
layers = 2
vocabulary = 8000
[train]
micro_batch_size = 2
global_batch_size = 16
";
    let recipe = crate::recipe::parsed(text).unwrap();
    let report = plan(&recipe).unwrap();
    let need = |rank: usize| report.ranks[rank].peak.total();
    assert!(need(0) < need(1));
    let check = |ranks, bytes| {
        let of = "this machine has".into();
        let limit = Limit {
            ranks,
            bytes,
            of,
            is_host: true,
        };
        limit
            .check(&recipe, &report)
            .map_err(|error| error.to_string())
    };
    for (ranks, needed, names) in [
        (Ranks::Fullest, need(1), "a rank of pipeline rank 1 needs"),
        (Ranks::Rank(0), need(0), "rank 0 needs"),
        (Ranks::Here(2), 2 * need(0), "2 ranks need"),
        (Ranks::Here(4), 2 * (need(0) + need(1)), "4 ranks need"),
    ] {
        check(ranks, needed).unwrap();
        let error = check(ranks, needed - 1).unwrap_err();
        assert!(error.starts_with(names), "{error}");
        assert!(error.contains("and this machine has"), "{error}");
    }
}

#[test]
fn whole_sequences_are_planned_beside_split_ones() {
    let text = "[parallel]\ncontext = 2\n[model]\nlayers = 1\n";
    let split = crate::recipe::parsed(text).unwrap();
    let planned = PlannedMemory::new(&split);
    let whole = plan(&crate::recipe::parsed("[model]\nlayers = 1\n").unwrap()).unwrap();
    assert_eq!(
        planned.whole_sequences,
        Some(whole.fullest().1.peak.total())
    );
    assert!(planned.to_string().ends_with(" with whole sequences"));
}

/// Under hybrid context parallelism a rank may have a micro-batch of whole rows.
#[test]
fn a_micro_batch_of_documents_is_planned_as_rows() {
    let peak = |parallel: &str, rows: usize| {
        let text = format!(
            "[parallel]\n{parallel}\n[model]\nfamily = \"llama\"\ncontext = 128\nlayers = 2\n\
             [train]\nmicro_batch_size = {rows}\nglobal_batch_size = 16\n"
        );
        let report = plan(&crate::recipe::parsed(&text).unwrap()).unwrap();
        report.fullest().1.peak.total()
    };
    for (tokens, rows) in [(128, 1), (256, 2)] {
        let hybrid = format!(
            "data = 2\ncontext = 2\nhybrid_context_parallel = true\nmax_seqlen_per_dp_cp_rank = {tokens}"
        );
        assert_eq!(peak(&hybrid, 1), peak("data = 4", rows), "{tokens} tokens");
    }
}
