//! The targets.

use burn_megatron::pipeline::schedule::{
    Schedule, ScheduleConfig, ScheduleKind, generate, validate,
};
use burn_megatron::verify::Layout;
use burn_megatron_examples::check_recipe;

use super::Target;

const TINY: &str = include_str!("../../../examples/recipes/tiny.toml");
const GPT2: &str = include_str!("../../../examples/recipes/gpt2.toml");

/// All targets.
pub const TARGETS: &[Target] = &[
    Target {
        name: "layout",
        seeds: || {
            texts(&[
                "tp2-sp-dp2-mb1",
                "tp1-dp4-z3-hsdp2",
                "pp2-dp2/interleaved/v2",
            ])
        },
        run: |input| text(input).is_some_and(|text| text.parse::<Layout>().is_ok()),
    },
    Target {
        name: "recipe",
        seeds: || {
            texts(&[
                TINY,
                GPT2,
                "[fp8]\nrecipe = \"delayed\"\n[train]\nsteps = 30",
            ])
        },
        run: |input| text(input).is_some_and(|text| check_recipe(text).is_ok()),
    },
    Target {
        name: "schedule_csv",
        seeds: schedules,
        run: |input| {
            let schedule = text(input).map(|text| Schedule::from_csv("fuzzed.csv", text));
            schedule.is_some_and(|schedule| schedule.is_ok_and(|s| validate(&s).is_ok()))
        },
    },
];

fn text(input: &[u8]) -> Option<&str> {
    std::str::from_utf8(input).ok()
}

fn texts(texts: &[&str]) -> Vec<Vec<u8>> {
    texts.iter().map(|text| text.as_bytes().to_vec()).collect()
}

fn schedules() -> Vec<Vec<u8>> {
    let kinds = [
        (ScheduleKind::OneFOneB, 2),
        (ScheduleKind::ZbV, 2),
        (ScheduleKind::GPipe, 3),
    ];
    let csv = |(kind, ranks)| {
        let schedule = generate(&ScheduleConfig::new(kind, ranks, 4)).expect("a usual schedule");
        schedule.to_csv().into_bytes()
    };
    kinds.into_iter().map(csv).collect()
}
