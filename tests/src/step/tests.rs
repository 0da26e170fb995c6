//! Tests of reports and budgets with artificial steps.

use std::collections::BTreeSet;

use burn_megatron_kernel_check::bound::launch::{LaunchCounts, ProductCounts};
use burn_megatron_kernel_check::bound::{H100, H200};

use super::budget::{Budgets, Failure};
use super::counts::Launch;
use super::{ROW, StepCase, StepCounts, StepReport, StepRuns};

/// The bytes of `[ROW, 768]` with 16 bits.
const PASS: f64 = (ROW * 768 * 2) as f64;

fn launch(kernel: &str, counts: LaunchCounts) -> Launch {
    Launch {
        kernel: kernel.into(),
        counts,
        warps: 4.0 * counts.cubes,
        instructions: 2.0 * counts.issued,
        matrix: 0.0,
        accessed: 2.0 * counts.bytes,
    }
}

/// Returns an artificial step. A layer runs `norm_x_bf16` once and the atomic addition `add` twice, and has one
/// product. Behind the layers is `sum` with one cube.
fn step(layers: usize, rows: usize) -> StepCounts {
    let rows = rows as f64;
    let norm = LaunchCounts {
        cubes: 128.0 * rows,
        issued: 1e3 * rows,
        bytes: 2.0 * PASS * rows,
        longest_plane: 20.0,
        ..LaunchCounts::default()
    };
    let add = LaunchCounts {
        cubes: 200.0,
        issued: 100.0,
        bytes: 4e3,
        ..LaunchCounts::default()
    };
    let sum = LaunchCounts {
        cubes: 3.0,
        issued: 10.0 * rows,
        longest_plane: 1e3 + 2e3 * rows,
        ..LaunchCounts::default()
    };
    let product = ProductCounts {
        sizes: [1024.0 * rows, 768.0, 768.0],
        bits: 16,
        bytes: 1.0,
    };
    let layer = [
        launch("norm_x_bf16", norm),
        launch("add", add),
        launch("add", add),
    ];
    let mut step = StepCounts {
        launches: vec![layer; layers].concat(),
        products: vec![product; layers],
        to_host: 2,
        to_device: 4,
        ..StepCounts::default()
    };
    step.launches.push(launch("sum", sum));
    step.waits.insert("cuEventSynchronize".into(), 3);
    step
}

fn runs() -> StepRuns {
    StepRuns([1, 2].map(|layers| [1, 2].map(|rows| step(layers, rows))))
}

fn report(runs: &StepRuns) -> StepReport {
    let [case, ..] = StepCase::all();
    StepReport::new(&case, runs).unwrap()
}

#[track_caller]
fn assert_near(found: f64, expected: f64) {
    assert!((found / expected - 1.0).abs() < 1e-9, "{found} {expected}");
}

#[test]
fn layers_are_told_from_the_rest() {
    let report = report(&runs());
    let row = |kernel: &str| {
        let row = report.rows.iter().find(|row| row.kernel == kernel);
        row.unwrap_or_else(|| panic!("no {kernel}")).clone()
    };
    let launches = |kernel: &str| [row(kernel).layer.launches, row(kernel).rest.launches];
    assert_eq!(launches("norm_x_bf16"), [1.0, 0.0]);
    assert_eq!(launches("add"), [2.0, 0.0]);
    assert_eq!(launches("sum"), [0.0, 1.0]);
    let norm = row("norm_x_bf16");
    assert_eq!([norm.cubes, norm.longest], [64.0 * 128.0, 20.0]);
    assert_eq!((norm.accessed, norm.limit), (2.0, "memory"));
    assert_near(norm.layer.passes, 2.0);
    assert_near(norm.layer.seconds, 128.0 * PASS / H100.copy);
    assert_eq!(report.layer().launches, 3.0);
    assert_near(report.layer().passes, 2.0);
    // Products are last, independent of their time.
    let last = report.rows.last().unwrap();
    assert_eq!((&*last.kernel, last.layer.launches), ("cuBLASLt", 1.0));
    let product = 2.0 * 65_536.0 * 768.0 * 768.0 / 989.4e12;
    let sum = 4.0 * (1e3 + 2e3 * 64.0) / 1.98e9;
    let of = |copy: f64| {
        let add = 4e3 / copy;
        12.0 * (128.0 * PASS / copy + 2.0 * add + product) + sum
    };
    assert_near(report.seconds(), of(H100.copy));
    assert_near(report.h200_seconds, of(H200.copy));
    let text = report.to_string();
    assert!(text.contains("| sum | 0, 1 | 3 | 129000 |"), "{text}");
    assert!(
        text.contains("A layer launches 3 kernels, which make 2.0 passes"),
        "{text}"
    );
}

const BUDGETS: &str = "
allowed = ['norm', 'sum']

[models.gpt-768]
launches_per_layer = 3
passes_per_layer = 2
copies_to_host = 2
copies_to_device = 4
waits = 3
known = ['idle: sum']
";

fn names(failures: &[Failure]) -> Vec<&str> {
    failures.iter().map(|failure| &*failure.name).collect()
}

/// Returns the failures of a step after a replacement in the text of the budgets.
fn failures(runs: &StepRuns, [from, to]: [&str; 2]) -> Vec<Failure> {
    assert!(BUDGETS.contains(from));
    let budgets = Budgets::parse(&BUDGETS.replace(from, to)).unwrap();
    let ours = BTreeSet::from(["norm".into(), "su".into()]);
    budgets.failures(&report(runs), &ours).unwrap()
}

#[test]
fn each_budget_is_kept() {
    assert_eq!(failures(&runs(), ["known", "known"]), []);
    for (from, to, name) in [
        ("layer = 3", "layer = 2", "launches per layer"),
        (
            "passes_per_layer = 2",
            "passes_per_layer = 1.9",
            "passes per layer",
        ),
        ("host = 2", "host = 1", "copies to the host"),
        ("device = 4", "device = 3", "copies to the device"),
        ("waits = 3", "waits = 2", "waits"),
        ("'idle: sum'", "", "idle: sum"),
        ("'norm', 'sum'", "", "foreign: sum"),
    ] {
        assert_eq!(names(&failures(&runs(), [from, to])), [name]);
    }
    // A lower number is not a failure. Kernels that do not grow with the tokens may belong to any crate.
    assert_eq!(failures(&runs(), ["layer = 3", "layer = 4"]), []);
    let text = failures(&runs(), ["'idle: sum'", ""])[0].to_string();
    assert!(
        text.contains("3 cubes") && text.contains("129000"),
        "{text}"
    );
}

#[test]
fn what_is_known_to_fail_must_fail() {
    let found = failures(&runs(), ["idle: sum", "idle: sum', 'scalar: sum"]);
    assert_eq!(names(&found), ["scalar: sum"]);
    assert!(found[0].message.contains("passes"), "{}", found[0]);
    let other = BUDGETS.replace("gpt-768", "gpt-769");
    let missing = Budgets::parse(&other)
        .unwrap()
        .failures(&report(&runs()), &BTreeSet::new());
    assert!(missing.unwrap_err().contains("gpt-768"));
    let unknown = BUDGETS.replace("known", "unknown");
    assert!(Budgets::parse(&unknown).unwrap_err().contains("unknown"));
}

/// 1024 rows with 1000 floating-point instructions per 16-bit number.
#[test]
fn products_belong_on_matrix_units() {
    let with = |matrix_flops| {
        let mut runs = runs();
        for step in runs.0.as_flattened_mut() {
            let rows = step.launches[0].counts.cubes / 128.0;
            step.launches[0].counts = LaunchCounts {
                floats: 1e3 * PASS / 64.0 * rows,
                longest_plane: 1e5,
                matrix_flops,
                ..step.launches[0].counts
            };
        }
        failures(&runs, ["known", "known"])
    };
    assert_eq!(names(&with(0.0)), ["scalar: norm_x_bf16"]);
    assert_eq!(names(&with(1.0)), [""; 0]);
}

#[test]
fn kernels_are_found_in_sources() {
    let found = super::budget::kernels_of(
        &std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../burn-megatron-kernels/src"),
    );
    let found = found.unwrap();
    for kernel in ["norm_forward", "attention_forward", "adamw_kernel"] {
        assert!(found.contains(kernel), "{found:?}");
    }
    assert!(!found.contains("reduce_kernel"));
}
