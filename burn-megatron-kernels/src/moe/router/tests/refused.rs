use super::*;

#[test]
fn options_that_do_not_fit_are_refused() {
    let message = |options: RouterOptions, experts: usize| match options.check(experts) {
        Err(error) => error.to_string(),
        Ok(()) => panic!("{options:?} must be refused"),
    };
    let grouped = |groups, chosen, score| RouterOptions {
        groups: Some(ExpertGroups {
            groups,
            chosen,
            score,
        }),
        ..RouterOptions::new(4)
    };
    for (options, experts, expected) in [
        (
            RouterOptions::new(0),
            4,
            "top_k = 0 of 4 experts: expected 1 to 4",
        ),
        (
            RouterOptions::new(5),
            4,
            "top_k = 5 of 4 experts: expected 1 to 4",
        ),
        (
            grouped(3, 1, GroupScore::Max),
            8,
            "3 groups of 8 experts: expected a divisor of 8",
        ),
        (
            grouped(4, 5, GroupScore::Max),
            8,
            "5 chosen groups of 4: expected 1 to 4",
        ),
        (
            grouped(4, 1, GroupScore::Max),
            8,
            "top_k = 4 with 1 chosen groups of 2 experts: expected at most 2",
        ),
        (
            grouped(4, 2, GroupScore::SumOf(3)),
            8,
            "a score of the 3 best of a group of 2 experts: expected 1 to 2",
        ),
        (
            grouped(4, 2, GroupScore::SumOf(0)),
            8,
            "a score of the 0 best of a group of 2 experts: expected 1 to 2",
        ),
    ] {
        assert_eq!(
            message(options, experts),
            format!("top_k_router: {expected}")
        );
    }
    let infinite = RouterOptions {
        scaling_factor: f64::INFINITY,
        ..RouterOptions::new(1)
    };
    insta::assert_snapshot!(
        message(infinite, 4),
        @"top_k_router: invalid scaling_factor = inf: expected a finite number"
    );
}

#[test]
#[should_panic(expected = "top_k_router: a bias [3] for 4 experts: expected [4]")]
fn a_bias_of_another_length_is_refused() {
    let device = Device::flex();
    let bias = Tensor::zeros([3], &device);
    let _ = top_k_router(
        Tensor::zeros([2, 4], &device),
        &RouterOptions::new(1),
        Some(bias),
    );
}

#[test]
#[should_panic(expected = "top_k_router: indices [2, 3]: expected [tokens, top_k] = [2, 2]")]
fn indices_of_another_size_are_refused() {
    let device = Device::flex();
    let given = indices(vec![0; 6], 3, &device);
    let _ = router_weights(
        Tensor::zeros([2, 4], &device),
        given,
        &RouterOptions::new(2),
    );
}
