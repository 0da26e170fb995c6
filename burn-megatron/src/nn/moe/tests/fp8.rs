//! Tests FP8 experts in every layout.

use super::*;

fn run(recipe: &str, recompute: bool) -> Run {
    Run {
        recompute,
        fp8: Fp8Config {
            recipe: recipe.parse().ok(),
            ..Fp8Config::default()
        },
        ..Run::default()
    }
}

fn check(recipe: &str, layouts: &[Sizes]) {
    let run = run(recipe, false);
    for dispatcher in DISPATCHERS {
        let config = config(router()).with_bias(true).with_dispatcher(dispatcher);
        let expected = run.on(ONE, &config);
        let what = format!("{recipe}, {dispatcher:?}");
        let floats = Run::default().on(ONE, &config);
        assert_ne!(floats.output, expected.output, "{what}: not in 8 bits");
        let states = if recipe == "delayed" { 2 * EXPERTS } else { 0 };
        assert_eq!(expected.fp8.len(), states, "{what}");
        for sizes in layouts {
            let found = run.on(*sizes, &config);
            let what = format!("{what} on {sizes:?}");
            found.assert_near(&expected, &what);
            assert_eq!(found.fp8, expected.fp8, "{what}");
        }
    }
}

#[test]
fn delayed_scales_do_not_depend_on_the_layout() {
    let layouts = [
        [1, 2, 1, 1],
        [1, 4, 1, 1],
        [2, 1, 2, 1],
        [2, 2, 2, 1],
        [1, 2, 1, 2],
        [2, 4, 1, 2],
    ];
    check("delayed", &layouts);
}

/// The ranks that send rows to an expert have the complete batch, like a single rank. The parts of a tensor that is
/// split over the expert-tensor axis have the scale of the full tensor.
#[test]
fn current_scales_are_those_of_all_rows_of_an_expert() {
    check(
        "current",
        &[[1, 2, 1, 1], [2, 1, 2, 1], [2, 2, 1, 1], [2, 2, 2, 1]],
    );
}

/// The rows of an expert are quantized once for the whole batch, or once for each half of the batch.
#[test]
fn current_scales_of_parts_of_the_batch_are_others() {
    let config = config(router());
    let run = run("current", false);
    let (one, halves) = (run.on(ONE, &config), run.on([1, 2, 1, 2], &config));
    assert_ne!(one.output, halves.output);
}

#[test]
fn a_recomputed_layer_in_8_bits_has_the_gradients_of_a_recorded_one() {
    for recipe in ["delayed", "current", "blockwise", "mxfp8"] {
        for sizes in [ONE, [2, 2, 2, 1]] {
            let [found, expected] =
                [true, false].map(|recompute| run(recipe, recompute).on(sizes, &config(router())));
            assert_eq!(found.output, expected.output, "{recipe}");
            assert_eq!(found.parameters, expected.parameters, "{recipe}");
            assert_eq!(found.input_gradient, expected.input_gradient, "{recipe}");
        }
    }
}
