//! Compares planned memory with numbers that were computed by hand, and tests the table.

use insta::assert_snapshot;

use super::super::layout::{BucketRules, ParameterSize};
use super::*;
use crate::comm::DType::{self, BF16, F16, F32};
use crate::mesh::Grid;
use ZeroStage::{Gradients, Optimizer, Parameters, Replicated};

/// The number of elements of one layer, which every padding for up to 8 ranks divides.
const LAYER: usize = 128 * 100;

fn size(elements: usize, parameter: DType, gradient: DType) -> ParameterSize {
    ParameterSize {
        elements,
        parameter,
        gradient,
        grid: Grid::Dense,
        shared: false,
        unit: 0,
        quantized_bytes: None,
    }
}

fn layout_of(parameters: &[ParameterSize], ranks: usize) -> BufferLayout {
    let rules = BucketRules {
        size: Some(1),
        ..BucketRules::sharded(ranks)
    };
    BufferLayout::new(parameters, &rules).unwrap()
}

fn plan(layout: &BufferLayout, stage: ZeroStage) -> MemoryPlan {
    MemoryPlan::new(layout, &MemoryRules::adam(stage)).unwrap()
}

/// Returns the permanently allocated bytes per element.
fn permanent(plan: &MemoryPlan, elements: usize) -> f64 {
    (plan.total() - plan.buffers) as f64 / elements as f64
}

/// Checks the bytes per parameter of Adam for every stage and several numbers of ranks.
fn check(parameter: DType, gradient: DType, rules: MemoryRules, formulas: [fn(f64) -> f64; 4]) {
    for ranks in [1, 2, 4, 8] {
        let layout = layout_of(&[size(LAYER, parameter, gradient); 3], ranks);
        for (stage, formula) in ZeroStage::ALL.into_iter().zip(formulas) {
            let plan = MemoryPlan::new(&layout, &MemoryRules { stage, ..rules }).unwrap();
            let expected = formula(ranks as f64);
            let found = permanent(&plan, 3 * LAYER);
            assert_eq!(found, expected, "stage {stage} over {ranks} ranks");
        }
    }
}

#[test]
fn bf16_with_f32_gradients() {
    let formulas: [fn(f64) -> f64; 4] = [
        |_| 18.0,
        |d| 6.0 + 12.0 / d,
        |d| 2.0 + 16.0 / d,
        |d| 18.0 / d,
    ];
    check(BF16, F32, MemoryRules::adam(Replicated), formulas);
}

#[test]
fn f32_is_its_own_master() {
    let formulas: [fn(f64) -> f64; 4] = [
        |_| 16.0,
        |d| 8.0 + 8.0 / d,
        |d| 4.0 + 12.0 / d,
        |d| 16.0 / d,
    ];
    check(F32, F32, MemoryRules::adam(Replicated), formulas);
}

#[test]
fn f16_with_f16_gradients() {
    let formulas: [fn(f64) -> f64; 4] = [
        |_| 16.0,
        |d| 4.0 + 12.0 / d,
        |d| 2.0 + 14.0 / d,
        |d| 16.0 / d,
    ];
    check(F16, F16, MemoryRules::adam(Replicated), formulas);
}

#[test]
fn moments_of_16_bits() {
    let short_moments = MemoryRules {
        moment: BF16,
        ..MemoryRules::adam(Replicated)
    };
    let formulas: [fn(f64) -> f64; 4] = [
        |_| 14.0,
        |d| 6.0 + 8.0 / d,
        |d| 2.0 + 12.0 / d,
        |d| 14.0 / d,
    ];
    check(BF16, F32, short_moments, formulas);
}

#[test]
fn categories_of_a_stage() {
    let layout = layout_of(&[size(LAYER, BF16, F32)], 4);
    let layer = LAYER as u64;
    let shares = |stage| {
        let plan = plan(&layout, stage);
        [plan.parameters, plan.gradients, plan.optimizer].map(|bytes| 4 * bytes / layer)
    };
    assert_eq!(shares(Replicated), [8, 16, 48]);
    assert_eq!(shares(Optimizer), [8, 16, 12]);
    assert_eq!(shares(Gradients), [8, 4, 12]);
    assert_eq!(shares(Parameters), [2, 4, 12]);
}

/// FP8 weights have two copies of one byte, f32 gradients, a master weight and two moments, whether codes or values are
/// gathered.
#[test]
fn fp8_weights() {
    let layer = LAYER as u64;
    for parameter in [DType::U8, BF16, F32] {
        let weight = ParameterSize {
            quantized_bytes: Some(2 * LAYER),
            ..size(LAYER, parameter, F32)
        };
        for ranks in [2, 4] {
            let layout = layout_of(&[weight; 3], ranks);
            let shares = |stage| {
                let plan = plan(&layout, stage);
                [plan.parameters, plan.gradients, plan.optimizer].map(|bytes| bytes / layer)
            };
            let d = ranks as u64;
            assert_eq!(shares(Optimizer), [6, 12, 36 / d]);
            assert_eq!(shares(Gradients), [6, 12 / d, 36 / d]);
            // All codes are gathered in one call. Values reuse the memory of gradients.
            let buffers = if parameter == DType::U8 { 3 } else { 0 };
            assert_eq!(plan(&layout, Optimizer).buffers, buffers * layer);
            assert_eq!(plan(&layout, Gradients).buffers, 8 * layer);
        }
    }
}

#[test]
fn experts_are_sharded_over_their_own_ranks() {
    let expert = ParameterSize {
        grid: Grid::Expert,
        ..size(LAYER, BF16, F32)
    };
    let rules = BucketRules {
        expert_ranks: Some(2),
        ..BucketRules::sharded(8)
    };
    let layout = BufferLayout::new(&[size(LAYER, BF16, F32), expert], &rules).unwrap();
    let plan = plan(&layout, Parameters);
    assert_eq!(plan.optimizer, (LAYER * 12 / 8 + LAYER * 12 / 2) as u64);
}

#[test]
fn padding_counts() {
    let layout = layout_of(&[size(1, BF16, F32)], 4);
    let plan = plan(&layout, Optimizer);
    assert_eq!((plan.parameters, plan.optimizer), (256, 128 * 12 / 4));
}

/// Parameters of 4, 1, 3 and 2 layers, each in its own unit.
fn uneven(shared: Option<usize>) -> BufferLayout {
    let mut parameters = [4, 1, 3, 2].map(|layers| size(layers * LAYER, BF16, F32));
    for (unit, parameter) in parameters.iter_mut().enumerate() {
        parameter.unit = unit;
    }
    if let Some(shared) = shared {
        parameters[shared].shared = true;
    }
    layout_of(&parameters, 2)
}

#[test]
fn temporary_buffers_of_each_stage() {
    let layers = |layout: &BufferLayout, stage| plan(layout, stage).buffers as usize / LAYER;
    let layout = uneven(None);
    assert_eq!(layers(&layout, Replicated), 0);
    assert_eq!(layers(&layout, Optimizer), 4 * 2 / 2);
    assert_eq!(layers(&layout, Gradients), (4 + 1) * 4);
    assert_eq!(layers(&layout, Parameters), (4 + 1) * 2 + (4 + 1) * 4);
    // A tied embedding: its gradient stays open, and it is gathered again after the last block.
    let tied = uneven(Some(0));
    assert_eq!(layers(&tied, Gradients), (3 + 2 + 4) * 4);
    assert_eq!(layers(&tied, Parameters), (2 + 4) * 2 + (3 + 2 + 4) * 4);
}

#[test]
fn a_unit_is_gathered_whole() {
    // Two units of two buckets each, and an additional buffer for the first unit.
    let mut parameters = [size(LAYER, BF16, F32); 5];
    parameters[0].parameter = F32;
    for parameter in &mut parameters[3..] {
        parameter.unit = 1;
    }
    let layout = layout_of(&parameters, 2);
    assert_eq!(layout.bucket_count(), 5);
    let gathered = plan(&layout, Parameters).buffers as usize / LAYER - (1 + 2) * 4;
    assert_eq!(gathered, (4 + 2 * 2) + 2 * 2);
}

#[test]
fn a_step_may_take_more_than_gradients() {
    let parameters = [
        size(LAYER, DType::F64, BF16),
        size(LAYER / 4, DType::F64, BF16),
    ];
    let layout = layout_of(&parameters, 2);
    assert_eq!(plan(&layout, Gradients).buffers as usize, LAYER * 8 / 2);
}

#[test]
fn hybrid_shards_are_larger() {
    let layout = layout_of(&[size(LAYER, BF16, F32)], 4);
    let rules = |shards| MemoryRules {
        shards,
        ..MemoryRules::adam(Optimizer)
    };
    let optimizer = |shards| MemoryPlan::new(&layout, &rules(shards)).unwrap().optimizer;
    assert_eq!(optimizer(None), (LAYER * 12 / 4) as u64);
    assert_eq!(optimizer(Some(2)), (LAYER * 12 / 2) as u64);
}

/// The parameter is in 16 bits, with gradients in f32.
#[test]
fn static_buffers_keep_all_gradients_beside_their_sums() {
    let layout = layout_of(&[size(LAYER, BF16, F32)], 4);
    let of = |stage, static_buffers, summed| {
        let rules = MemoryRules {
            static_buffers,
            summed,
            ..MemoryRules::adam(stage)
        };
        let plan = MemoryPlan::new(&layout, &rules).unwrap();
        [plan.gradients as usize, plan.buffers as usize]
    };
    assert_eq!(of(Replicated, true, false), [4 * LAYER, 0]);
    assert_eq!(of(Replicated, true, true), [8 * LAYER, 0]);
    for stage in [Optimizer, Gradients] {
        assert_eq!(of(stage, true, true), [4 * LAYER + LAYER, 2 * LAYER]);
    }
    assert_eq!(of(Gradients, false, true), [LAYER, 4 * LAYER]);
}

#[test]
fn bytes_that_overflow_64_bits() {
    let elements = isize::MAX as usize / 8;
    let layout = layout_of(&[size(elements & !127, F32, DType::F64)], 1);
    let error = MemoryPlan::new(&layout, &MemoryRules::adam(Parameters));
    assert!(matches!(error, Err(MemoryError::Overflow { bytes }) if bytes > u64::MAX as u128));
}

#[test]
fn no_parameters_take_no_memory() {
    let plan = plan(&layout_of(&[], 2), Parameters);
    assert_eq!(plan, MemoryPlan::default());
}

#[test]
fn stages_are_numbers() {
    for (number, stage) in ZeroStage::ALL.into_iter().enumerate() {
        assert_eq!(stage.to_string(), number.to_string());
        assert_eq!(number.to_string().parse(), Ok(stage));
        assert_eq!(serde_json::to_string(&stage).unwrap(), number.to_string());
        assert_eq!(
            serde_json::from_str::<ZeroStage>(&number.to_string()).unwrap(),
            stage
        );
    }
    assert!(Optimizer < Parameters);
    assert!(serde_json::from_str::<ZeroStage>("4").is_err());
    for text in ["4", "-1", "", "two", "256"] {
        assert_eq!(
            text.parse::<ZeroStage>(),
            Err(ParseZeroStageError(text.into()))
        );
    }
    assert_snapshot!(
        ParseZeroStageError("4".into()),
        @"invalid ZeRO stage \"4\": expected 0 (nothing is sharded), 1 (the optimizer state), 2 (the gradients \
          too) or 3 (the parameters too)"
    );
}

#[test]
fn the_displayed_table() {
    let plan = MemoryPlan {
        parameters: 2 << 30,
        gradients: 1000,
        optimizer: 1536 << 10,
        host_optimizer: 0,
        buffers: 0,
    };
    assert_snapshot!(plan, @"
    per rank         computed
    parameters       2.00 GiB
    gradients          1000 B
    optimizer state  1.50 MiB
    buffers               0 B
    total            2.00 GiB
    ");
    let measured = MemoryPlan {
        gradients: 1050,
        optimizer: 768 << 10,
        buffers: 512,
        ..plan
    };
    assert_snapshot!(plan.table(Some(&measured)), @"
    per rank         computed    measured  difference
    parameters       2.00 GiB    2.00 GiB      +0.0 %
    gradients          1000 B    1.03 KiB      +5.0 %
    optimizer state  1.50 MiB  768.00 KiB     -50.0 %
    buffers               0 B       512 B           -
    total            2.00 GiB    2.00 GiB      -0.0 %
    ");
}
