use std::path::Path;

use burn_megatron::comm::{Engine, World};
use rayon::prelude::*;

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
/// Tests a pipeline whose last rank has the logits of a large vocabulary.
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

/// Under hybrid context parallelism, a rank may have a micro-batch of whole rows.
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

/// Plans everything that can run: each family, each setting that changes the computation of a layer, and each shipped
/// recipe. Another test plans the published models.
#[test]
fn every_recipe_family_and_setting_is_planned() {
    let mut texts = vec![];
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/recipes");
    for file in std::fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        if !text.contains("\n# Plan:") {
            texts.push((path.display().to_string(), crate::recipe::read(&path)));
        }
    }
    assert!(texts.len() > 10, "{}", texts.len());
    let mut add = |name: &str, text: String| {
        let recipe = crate::recipe::parsed(&text);
        texts.push((
            text,
            recipe.unwrap_or_else(|error| panic!("{name}: {error}")),
        ));
    };
    let families = crate::family::Families::transformers();
    let sizes = "hidden = 32\nlayers = 2\nheads = 4\ncontext = 16";
    for model in families.models() {
        let family = model.family();
        for precision in ["f64", "f32", "bf16"] {
            let text = format!(
                "[model]\nfamily = '{family}'\nlayers = 4\n[data_parallel]\nprecision = '{precision}'"
            );
            add(family, text);
        }
    }
    let train = "[train]\nfreeze = ['blocks.0.**', 'embedding.**']";
    let lora = "[lora]\ntarget_modules = ['o_proj']";
    let recompute = "[memory.recompute]\ngranularity = 'full'";
    let tensor = "[parallel]\ntensor = 2\nsequence_parallel = true";
    for family in ["llama", "gemma2", "deepseek_v3"] {
        for setting in [train, lora] {
            for more in ["", recompute, tensor, "[data_parallel]\nprecision = 'f64'"] {
                let model = format!("[model]\nfamily = '{family}'\nlayers = 2");
                add(family, format!("{more}\n{setting}\n{model}"));
            }
        }
    }
    for moe in [
        "choice = 'sinkhorn'",
        "choice = 'round-robin'",
        "jitter = 0.1",
        "shared_width = 8, shared_gate = true",
        "capacity = { factor = 1.5, keep = 'largest-weights', pad = false }",
        "capacity = { factor = 1.5, keep = 'first', pad = true }",
        "losses = [{ kind = 'z-loss', coefficient = 0.01 }]",
        "score = 'sigmoid', bias_update_rate = 0.001",
        "score = 'sqrt-softplus'",
        "dispatcher = 'flex'",
        "dispatcher = 'all-gather'",
    ] {
        for more in ["", lora, train, "[data_parallel]\nprecision = 'f64'"] {
            let moe = format!("moe = {{ experts = 4, expert_width = 16, {moe} }}");
            add(
                &moe,
                format!("{more}\n[model]\nfamily = 'mixtral'\n{sizes}\n{moe}"),
            );
        }
    }
    let failed: Vec<_> = texts
        .par_iter()
        .filter_map(|(text, recipe)| {
            let error = plan(recipe).err()?;
            Some(format!("{error}: {text}"))
        })
        .collect();
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
}

/// Checks that a frozen parameter needs no gradient and no optimizer state, and that its layer saves no activations
/// for it.
#[test]
fn frozen_parameters_save_memory() {
    let peak = |settings: &str| {
        let text = format!("{settings}\n[model]\nfamily = 'llama'\nlayers = 4");
        plan(&crate::recipe::parsed(&text).unwrap())
            .unwrap()
            .fullest()
            .1
            .peak
    };
    let all = peak("");
    let frozen = peak("[train]\nfreeze = ['blocks.*.mlp.**']");
    let lora = peak("[lora]\ntarget_modules = ['o_proj']");
    assert!(frozen.optimizer < all.optimizer && lora.optimizer < frozen.optimizer);
    assert!(frozen.gradients < all.gradients && lora.gradients < frozen.gradients);
    assert!(frozen.activations < all.activations, "{frozen:?}, {all:?}");
}

#[test]
fn a_plan_for_most_of_a_device_is_tight() {
    let recipe = crate::recipe::parsed(RECIPE).unwrap();
    let planned = PlannedMemory::new(&recipe);
    let needed = plan(&recipe).unwrap().fullest().1.peak.total();
    assert!(planned.is_tight(needed));
    assert!(planned.is_tight(needed * 16 / 10));
    assert!(!planned.is_tight(needed * 17 / 10));
}
