use burn::module::{Module, Param};
use burn::tensor::{Device, TensorData};
use serde::Deserialize;

use super::exchange::{Matrix, owners};
use super::*;
use crate::comm::ParallelContext;
use crate::mesh::Axis;
use crate::nn::{ParallelModule, Placement, Section, TensorSlice};
use crate::optim::OptimizerConfig;

type Rows = Vec<Vec<f64>>;

/// A case of `tests/fixtures/muon/make.py`.
#[derive(Deserialize)]
struct Case {
    nesterov: bool,
    adjust_lr_fn: MuonScale,
    weight_decay: f64,
    start: Rows,
    gradients: Vec<Rows>,
    weights: Vec<Rows>,
}

/// Burn's weights have the shape inputs by outputs.
fn transposed(rows: &Rows) -> Vec<f64> {
    let columns = 0..rows[0].len();
    columns
        .flat_map(|column| rows.iter().map(move |row| row[column]))
        .collect()
}

#[derive(Module, Debug)]
struct One {
    weight: Param<Tensor<2>>,
}

#[test]
fn a_matrix_is_stepped_as_by_pytorch() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/muon/muon.json");
    let text = std::fs::read_to_string(path).unwrap();
    let cases: Vec<Case> = serde_json::from_str(&text).unwrap();
    assert_eq!(cases.len(), 3);
    for case in cases {
        let shape = [case.start[0].len(), case.start.len()];
        let data = |rows: &Rows| TensorData::new(transposed(rows), [shape[0] * shape[1]]);
        let tensor =
            |rows: &Rows| Tensor::<1>::from_data(data(rows), (&Device::flex(), DType::F64));
        let module = One {
            weight: Param::from_tensor(tensor(&case.start).reshape(shape)),
        };
        let model = ParallelModule::replicated(module);
        let mut ddp = DistributedDataParallel::new(model, &ParallelContext::single()).unwrap();
        let config = MuonConfig {
            momentum: 0.9,
            nesterov: case.nesterov,
            scale: case.adjust_lr_fn,
            weight_decay: case.weight_decay,
            ..MuonConfig::default()
        };
        let mut optimizer = ParallelMuon::new(&config, &ddp).unwrap();
        for (gradient, expected) in case.gradients.iter().zip(&case.weights) {
            let gradients = ddp.gradients_of(vec![tensor(gradient)], 1).unwrap();
            optimizer.step(0.02, &mut ddp, gradients);
            let found: Vec<f64> = ddp.parameters()[0]
                .clone()
                .into_data()
                .try_into_vec()
                .unwrap();
            for (found, expected) in found.iter().zip(transposed(expected)) {
                assert!(
                    (found - expected).abs() < 1e-13,
                    "{found} is not {expected}"
                );
            }
        }
    }
}

#[test]
fn singular_values_end_up_near_one() {
    let matrix = [[3.0, 0.0, 1.0], [-1.0, 0.1, 2.0]];
    let matrix = Tensor::<2>::from_data(matrix, (&Device::flex(), DType::F64));
    let x = orthogonalize(matrix.clone(), 5);
    // The eigenvalues of the 2 x 2 Gram matrix are the squared singular values.
    let gram: Vec<f64> = x
        .clone()
        .matmul(x.transpose())
        .into_data()
        .try_into_vec()
        .unwrap();
    let (trace, determinant) = (gram[0] + gram[3], gram[0] * gram[3] - gram[1] * gram[2]);
    let root = (trace * trace / 4.0 - determinant).sqrt();
    for value in [trace / 2.0 - root, trace / 2.0 + root] {
        assert!((0.6..1.3).contains(&value.sqrt()), "{value}");
    }
    let zeros = orthogonalize(matrix.zeros_like(), 5).into_data();
    assert!(zeros.iter::<f64>().all(|x| x == 0.0));
}

fn entry(shape: &[usize]) -> ParameterEntry {
    ParameterEntry::replicated("weight", shape.to_vec())
}

#[test]
fn fused_weights_and_stacks_are_several_matrices() {
    let slices = |entry: &ParameterEntry| -> Vec<_> {
        let all = Matrix::all_of(3, entry).into_iter();
        all.map(|matrix| {
            assert_eq!(matrix.index, 3);
            (matrix.slice.offset, matrix.slice.shape)
        })
        .collect()
    };
    assert_eq!(slices(&entry(&[4, 6])), [(vec![0, 0], vec![4, 6])]);
    // Queries, keys and values, which are the same over any number of ranks. The last section is padded.
    for parts in [1, 2] {
        let mut qkv = entry(&[4, 7]);
        let sections = [4, 2, 2].map(|size| Section { size, parts }).to_vec();
        qkv.placements = (Axis::Tensor, Placement::Split { dim: 1, sections }).into();
        let expected = [
            (vec![0, 0], vec![4, 4]),
            (vec![0, 4], vec![4, 2]),
            (vec![0, 6], vec![4, 1]),
        ];
        assert_eq!(slices(&qkv), expected);
    }
    // Gate and up projections of two experts, which are split over the expert axis.
    let mut experts = entry(&[2, 3, 8]);
    let sections = vec![Section { size: 4, parts: 1 }; 2];
    experts.placements = experts
        .placements
        .with(Axis::Expert, Placement::split(0, 2, 2))
        .with(Axis::ExpertTensor, Placement::Split { dim: 2, sections });
    let expected = [
        (vec![0, 0, 0], vec![1, 3, 4]),
        (vec![0, 0, 4], vec![1, 3, 4]),
        (vec![1, 0, 0], vec![1, 3, 4]),
        (vec![1, 0, 4], vec![1, 3, 4]),
    ];
    assert_eq!(slices(&experts), expected);
}

#[test]
fn the_costliest_matrices_are_on_ranks_of_their_own() {
    let matrix = |rows: usize| Matrix {
        index: 0,
        slice: TensorSlice::whole(&[rows, 8]),
    };
    let matrices = [1, 1, 8, 1, 8].map(matrix);
    assert_eq!(owners(&matrices, 1), [0; 5]);
    assert_eq!(owners(&matrices, 3), [2, 2, 0, 2, 1]);
    // Some ranks have no matrix.
    assert_eq!(owners(&matrices[..1], 4), [0]);
}

#[test]
fn hidden_matrices_are_chosen_and_groups_choose_otherwise() {
    let group = |pattern: &str, optimizer| ParameterGroup {
        pattern: pattern.into(),
        optimizer: Some(optimizer),
        ..ParameterGroup::default()
    };
    let named = |path: &str, shape: &[usize], hidden| ParameterEntry {
        hidden,
        ..ParameterEntry::replicated(path, shape.to_vec())
    };
    let entries = [
        named("embedding", &[9, 4], false),
        named("up", &[4, 8], true),
        named("experts", &[2, 4, 8], true),
        named("bias", &[8], false),
    ];
    let choose = |groups: Vec<ParameterGroup>| {
        let config = MuonConfig {
            groups,
            ..MuonConfig::default()
        };
        config.choose(&entries).map_err(|error| error.to_string())
    };
    assert_eq!(choose(vec![]), Ok(vec![false, true, true, false]));
    let other = vec![
        group("e*", GroupOptimizer::Muon),
        group("up", GroupOptimizer::AdamW),
    ];
    assert_eq!(choose(other), Ok(vec![true, false, true, false]));
    assert_eq!(
        choose(vec![group("bias", GroupOptimizer::Muon)]),
        Err(
            "a parameter group chooses muon for bias of shape [8]: expected a matrix, or a stack of matrices"
                .into()
        )
    );
    let check = |config: &OptimizerConfig| config.check().unwrap_err().to_string();
    let adamw = AdamWConfig {
        groups: vec![group("up", GroupOptimizer::AdamW)],
        ..AdamWConfig::default()
    };
    insta::assert_snapshot!(
        check(&adamw.clone().into()),
        @"the parameter group `up` chooses an optimizer, which requires the optimizer muon, but this run has adamw"
    );
    let muon = MuonConfig {
        adamw,
        ..MuonConfig::default()
    };
    assert!(check(&OptimizerConfig::Muon(muon)).contains("is in the settings of AdamW for muon"));
}
