use burn_megatron::comm::World;
use insta::assert_snapshot;

use super::*;
use crate::recipe::parsed;

const MLP: EpilogueShape = EpilogueShape {
    hidden: 64,
    width: 256,
    bias: true,
};

const WIDE: EpilogueShape = EpilogueShape { width: 512, ..MLP };

fn accepted(_: &EpilogueShape) -> Result<(), String> {
    Ok(())
}

fn never(_: EpilogueShape) -> Result<[f64; 2], Error> {
    panic!("nothing is timed")
}

/// Decides for two layers of one size and a wider layer. `times` returns the times for each size.
fn decided(times: impl Fn(EpilogueShape) -> [f64; 2]) -> EpilogueDecision {
    let mut timed = vec![];
    let mlps = vec![MLP, WIDE, MLP];
    let decision = decide(Ok(mlps), accepted, |mlp| {
        timed.push(mlp);
        Ok(times(mlp))
    });
    assert_eq!(timed, [MLP, WIDE], "each size once");
    decision.unwrap()
}

#[test]
fn the_faster_form_of_all_layers_is_chosen() {
    let of = |mlp: EpilogueShape, faster: EpilogueShape| match mlp == faster {
        true => [2e-3, 3e-3],
        false => [3.5e-3, 2e-3],
    };
    // Two layers gain 1 ms each, and the wider one loses 1.5 ms.
    let on = decided(|mlp| of(mlp, MLP));
    assert_snapshot!(
        on.line,
        @"on: 7.500 ms with, 8.000 ms without, of GELU and its matrix products in 3 layers per micro-batch"
    );
    assert!(on.fuse);
    let off = decided(|mlp| of(mlp, WIDE));
    let line = "off: 9.000 ms with, 7.000 ms without";
    assert!(!off.fuse && off.line.starts_with(line), "{off:?}");
    let tie = decided(|_| [1e-3, 1e-3]);
    assert!(!tie.fuse && tie.line.starts_with("off: "), "{tie:?}");
}

#[test]
fn what_cannot_have_epilogues_is_off_with_the_reason() {
    let refused = |mlps: Result<_, Error>, check: fn(&EpilogueShape) -> Result<(), String>| {
        let decision = decide(mlps, check, never).unwrap();
        assert!(!decision.fuse, "{decision:?}");
        decision.line
    };
    let device = |_: &EpilogueShape| Err("the fused epilogues require a CUDA device".to_string());
    assert_snapshot!(refused(Ok(vec![MLP]), device), @"off: the fused epilogues require a CUDA device");
    assert_snapshot!(refused(Ok(vec![]), accepted), @"off: the model has no MLP");
    let advice = "mlp: it has adapters: remove one of the two; or remove epilogue_fusion";
    assert_snapshot!(
        refused(Err(advice.into()), accepted),
        @"off: mlp: it has adapters: remove one of the two"
    );
}

#[test]
fn every_rank_takes_what_rank_0_has_measured() {
    let measured = EpilogueDecision {
        fuse: true,
        line: "on: 1 ms with, 2 ms without".into(),
    };
    let shared = World::threads(3).unwrap().run(|rank| {
        let world = rank.communicator();
        let measure = || match world.rank() {
            0 => Ok(measured.clone()),
            rank => panic!("rank {rank} measures"),
        };
        share_by(&*world, measure)
    });
    assert_eq!(shared.unwrap(), vec![measured; 3]);
    let failed = World::threads(2).unwrap().run(|rank| {
        let shared = share_by(&*rank.communicator(), || Err("the device is lost".into()));
        Ok::<_, Error>(shared.unwrap_err().to_string())
    });
    let error = "kernels.epilogue_fusion = \"measured\": the device is lost; use true or false";
    assert_eq!(failed.unwrap(), [error, error]);
}

/// GPT with two layers on two stages, in one micro-batch of 3 x 32 tokens.
const GPT: &str = "
[parallel]
tensor = 2
context = 2
pipeline = 2
[model]
family = \"gpt2\"
layers = 2
hidden = 64
heads = 4
context = 32
[train]
micro_batch_size = 3
global_batch_size = 6
[kernels]
epilogue_fusion = \"measured\"
";

/// Returns the MLPs of a recipe, or the reason why they cannot have epilogues.
fn mlps_of(text: &str) -> (Recipe, Result<Vec<EpilogueShape>, String>) {
    let recipe = parsed(text).unwrap();
    let plan = recipe.plan().unwrap();
    let mlps = mlps(&recipe, &plan, &Device::flex());
    (recipe, mlps.map_err(|error| error.to_string()))
}

#[test]
fn the_mlps_of_all_stages_are_timed_in_the_sizes_of_a_rank() {
    let (recipe, mlps) = mlps_of(GPT);
    let half = EpilogueShape { width: 128, ..MLP };
    assert_eq!(mlps.unwrap(), [half, half]);
    assert_eq!(rows(&recipe), 3 * 32 / 2);
    let lora = format!("{GPT}[lora]\ntarget_modules = [\"all-linear\"]\n");
    let error = mlps_of(&lora).1.unwrap_err();
    assert!(error.contains("layers with adapters (lora)"), "{error}");
    let recomputed = format!(
        "{GPT}[memory.recompute]\ngranularity = \"selective\"\nmodules = [\"activation\"]\n"
    );
    let error = mlps_of(&recomputed).1.unwrap_err();
    assert!(error.contains("cannot recompute \"activation\""), "{error}");
}

#[test]
fn a_cpu_has_no_epilogues_and_its_ranks_agree_on_that() {
    let recipe = parsed(GPT).unwrap();
    let plan = recipe.plan().unwrap();
    let shared = World::threads(2).unwrap().run(|rank| {
        let decision = share(&recipe, &plan, &Device::flex(), &*rank.communicator())?;
        Ok::<_, Error>(decision.unwrap())
    });
    for EpilogueDecision { fuse, line } in shared.unwrap() {
        assert!(!fuse);
        let reason = "off: the fused epilogues require a CUDA device";
        assert!(line.starts_with(reason), "{line}");
    }
    let fixed = parsed(&GPT.replace("\"measured\"", "false")).unwrap();
    World::threads(1)
        .unwrap()
        .run(|rank| {
            let shared = share(&fixed, &plan, &Device::flex(), &*rank.communicator())?;
            assert_eq!(shared, None);
            Ok::<_, Error>(())
        })
        .unwrap();
}

#[test]
fn both_forms_are_timed() {
    for bias in [true, false] {
        let mlp = EpilogueShape { bias, ..MLP };
        let times = time(&mlp, 4, DType::F32, &Device::flex()).unwrap();
        assert!(times.iter().all(|time| *time > 0.0), "{times:?}");
    }
}
