//! Tests that the state is part of the record of a layer and of checkpoints.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::store::ModuleRecord;
use burn::tensor::{Device, Tensor};

use super::*;

fn delayed() -> Fp8Config {
    let settings = DelayedScaling {
        history: 3,
        ..DelayedScaling::default()
    };
    config((Fp8Recipe::Delayed(settings), Fp8Format::Hybrid))
}

#[derive(Module, Debug)]
struct Model {
    mlp: ParallelMlp,
}

fn mlp(fp8: &Fp8Config) -> (ParallelMlp, Fp8) {
    let builder = builder(&ParallelContext::single(), fp8);
    let config = ParallelMlpConfig {
        hidden: 8,
        width: 16,
        activation: Activation::Gelu,
        bias: true,
        init: Init::Normal(0.5),
        output_init: Init::Normal(0.5),
    };
    let mlp = config.init(&builder.child("mlp")).unwrap();
    let model = builder.finish(Model { mlp }).unwrap();
    (model.module.mlp, model.fp8)
}

fn train(mlp: &ParallelMlp, fp8: &Fp8, phase: f64) -> Vec<f32> {
    let x = leaf(spread([2, 3, 8], phase));
    let y = mlp.forward(x.clone());
    let gradients = backward(y, spread([2, 3, 8], phase + 1.0));
    fp8.end_step_single_rank().unwrap();
    floats(x.grad(&gradients).unwrap())
}

#[test]
fn a_record_has_the_state_beside_the_parameters() {
    let (mlp, fp8) = mlp(&delayed());
    train(&mlp, &fp8, 0.5);
    train(&mlp, &fp8, 5.5);
    let states = fp8.states();
    let paths: Vec<_> = states.keys().map(String::as_str).collect();
    assert_eq!(paths, ["mlp.down", "mlp.up"]);
    let record = mlp.clone().into_record();
    assert_eq!(record.len(), 4 + 2);
    let record = ModuleRecord::from_bytes(record.into_bytes().unwrap()).unwrap();

    let (other, other_fp8) = self::mlp(&delayed());
    assert_ne!(other_fp8.states(), states);
    let other = other.load_record(record);
    assert_eq!(other_fp8.states(), states);
    // The second model continues the training of the first model.
    assert_eq!(
        bits(&train(&other, &other_fp8, 9.5)),
        bits(&train(&mlp, &fp8, 9.5))
    );
    assert_eq!(other_fp8.states(), fp8.states());
}

#[test]
fn other_recipes_have_the_parameters_alone() {
    for recipe in recipes() {
        if matches!(recipe.0, Fp8Recipe::Delayed(_)) {
            continue;
        }
        let (mlp, fp8) = mlp(&config(recipe));
        train(&mlp, &fp8, 0.5);
        assert!(fp8.states().is_empty());
        assert_eq!(mlp.into_record().len(), 4);
    }
}

#[test]
fn an_integer_state_is_no_parameter() {
    let (mlp, fp8) = mlp(&delayed());
    let (plain, _) = self::mlp(&Fp8Config::default());
    assert_eq!(mlp.num_params(), plain.num_params());
    assert_eq!(
        ParameterTable::replicated(&mlp),
        ParameterTable::replicated(&plain)
    );
    train(&mlp, &fp8, 0.5);
    let before = fp8.states();
    // A float mapper, a move, a validation and the way back do not change the layer.
    let device = Device::flex();
    let moved = mlp
        .clone()
        .no_grad()
        .fork(&device)
        .to_device(&device)
        .valid()
        .train();
    assert_eq!(fp8.states(), before);
    let moved = moved.set_require_grad(true);
    train(&moved, &fp8, 3.5);
    assert_ne!(fp8.states(), before, "it is the layer itself that went on");
}

#[test]
fn a_record_of_another_length_is_refused() {
    let (mlp, _) = mlp(&delayed());
    let longer = DelayedScaling {
        history: 4,
        ..DelayedScaling::default()
    };
    let (other, _) = self::mlp(&config((Fp8Recipe::Delayed(longer), Fp8Format::Hybrid)));
    assert!(other.try_load_record(mlp.into_record()).is_err());
}

#[test]
fn a_checkpoint_brings_the_states_back() {
    let (mlp, fp8) = mlp(&delayed());
    train(&mlp, &fp8, 0.5);
    let text = serde_json::to_string(&fp8.states()).unwrap();
    let mut saved: BTreeMap<String, Fp8LayerState> = serde_json::from_str(&text).unwrap();
    // The states of other stages are present too.
    saved.insert("blocks.7.mlp.up".into(), state([1.0; 3], 3));
    let (other, other_fp8) = self::mlp(&delayed());
    other_fp8.load(&saved).unwrap();
    assert_eq!(other_fp8.states(), fp8.states());
    assert_eq!(
        bits(&train(&other, &other_fp8, 9.5)),
        bits(&train(&mlp, &fp8, 9.5))
    );
}

#[test]
fn a_checkpoint_that_does_not_fit_changes_nothing() {
    let (mlp, fp8) = mlp(&delayed());
    train(&mlp, &fp8, 0.5);
    let good = fp8.states();
    let refused = |states: &BTreeMap<String, Fp8LayerState>| {
        let error = fp8.load(states).unwrap_err().to_string();
        assert_eq!(fp8.states(), good);
        error
    };
    let mut states = good.clone();
    // Removes the last of two states.
    let last = states.remove("mlp.up").unwrap();
    states.insert("mlp.upp".into(), last);
    states.get_mut("mlp.down").unwrap().input.scale = 2f32.to_bits();
    let expected = "there is no FP8 state of mlp.up; the nearest are mlp.upp, mlp.down";
    assert_eq!(refused(&states), expected);

    let mut states = good.clone();
    states.get_mut("mlp.down").unwrap().input.scale = 2f32.to_bits();
    states.get_mut("mlp.up").unwrap().gradient.scale = f32::NAN.to_bits();
    let expected = "invalid FP8 state of mlp.up, gradient: invalid scale NaN: expected a finite number above 0";
    assert_eq!(refused(&states), expected);

    let mut states = good.clone();
    states.get_mut("mlp.up").unwrap().weight.history.pop();
    let expected =
        "invalid FP8 state of mlp.up, weight: its history has 2 steps, expected 3; set history = 2";
    assert_eq!(refused(&states), expected);
}

/// A clone shares the state of the module.
#[test]
fn clones_are_one_layer() {
    let (mlp, fp8) = mlp(&delayed());
    let clone = mlp.clone();
    train(&clone, &fp8, 0.5);
    let x: Tensor<3> = spread([1, 2, 8], 4.0);
    let outputs = [&mlp, &clone].map(|mlp| bits(&floats(mlp.forward(leaf(x.clone())).inner())));
    assert_eq!(outputs[0], outputs[1]);
    let (fresh, _) = self::mlp(&delayed());
    assert_ne!(bits(&floats(fresh.forward(leaf(x)).inner())), outputs[0]);
}
