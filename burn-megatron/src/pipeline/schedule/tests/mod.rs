use super::*;
use std::collections::HashMap;
/// Total when each computation waits for its own inputs alone.
fn dataflow(s: &Schedule, t: &Times) -> f64 {
    let mut done: HashMap<(bool, usize, usize), f64> = HashMap::new();
    let mut clock = vec![0f64; s.ranks()];
    let lists: Vec<Vec<Action>> = (0..s.ranks())
        .map(|r| {
            s.actions(r)
                .iter()
                .filter(|a| a.kind.is_compute())
                .copied()
                .collect()
        })
        .collect();
    let mut next = vec![0; s.ranks()];
    loop {
        let mut moved = false;
        for r in 0..s.ranks() {
            while let Some(a) = lists[r].get(next[r]) {
                let (st, mb) = (a.stage, a.micro_batch);
                let lag = |other: usize| {
                    if s.rank_of(other) == r {
                        0.
                    } else {
                        t.transfer[other]
                    }
                };
                let input = match a.kind {
                    ActionKind::Forward => {
                        if st == 0 {
                            Some(0.)
                        } else {
                            done.get(&(true, st - 1, mb)).map(|e| e + lag(st - 1))
                        }
                    }
                    ActionKind::WeightGradient => Some(0.),
                    _ => {
                        if st + 1 == s.stages() {
                            Some(0.)
                        } else {
                            done.get(&(false, st + 1, mb)).map(|e| e + lag(st + 1))
                        }
                    }
                };
                let Some(input) = input else { break };
                let d = match a.kind {
                    ActionKind::Forward => t.forward[st],
                    ActionKind::InputGradient => t.input_gradient[st],
                    ActionKind::WeightGradient => t.weight_gradient[st],
                    _ => t.input_gradient[st] + t.weight_gradient[st],
                };
                clock[r] = clock[r].max(input) + d;
                match a.kind {
                    ActionKind::Forward => {
                        done.insert((true, st, mb), clock[r]);
                    }
                    ActionKind::WeightGradient => {}
                    _ => {
                        done.insert((false, st, mb), clock[r]);
                    }
                }
                next[r] += 1;
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    assert!((0..s.ranks()).all(|r| next[r] == lists[r].len()));
    clock.into_iter().fold(0., f64::max)
}
#[test]
fn explore() {
    for kind in ScheduleKind::ALL {
        for m in [4usize, 8, 16] {
            let c = ScheduleConfig::new(kind, 4, m);
            let s = match generate(&c) {
                Ok(s) => s,
                Err(e) => {
                    println!("{kind} {m}: {e}");
                    continue;
                }
            };
            for (f, i, w, t) in [
                (1., 1., 1., 0.),
                (1., 1., 1., 0.1),
                (1., 1.2, 0.8, 0.),
                (1., 2., 1., 0.),
            ] {
                let times = Times::uniform(s.stages(), f, i, w, t);
                let x = simulate(&s, &times).unwrap();
                println!(
                    "{kind:12} m{m} {f} {i} {w} {t}: total {:.3} dataflow {:.3}",
                    x.total(),
                    dataflow(&s, &times)
                );
            }
        }
    }
    for p in [1, 2, 3, 4, 5, 8] {
        for m in [1, 2, 2 * p, 2 * p + 1, 4 * p] {
            for kind in ScheduleKind::ALL {
                let Ok(s) = generate(&ScheduleConfig::new(kind, p, m)) else {
                    continue;
                };
                let r = validate(&s).unwrap();
                for (f, i, w) in [
                    (1., 1., 1.),
                    (1., 1.2, 0.8),
                    (1., 1.2, 0.6),
                    (1., 2., 1.),
                    (1., 0.9, 0.8),
                ] {
                    let times = Times::uniform(s.stages(), f, i, w, 0.);
                    let x = simulate(&s, &times).unwrap();
                    println!(
                        "P {kind} {p} {m} {f} {i} {w} extra {:.2} dataflow {:.2} peak {:?}",
                        x.total() - x.busy(0),
                        dataflow(&s, &times) - x.busy(0),
                        r.peak_activations
                    );
                }
            }
        }
    }
}
#[test]
fn show() {
    for (kind, v) in [(ScheduleKind::OneFOneB,1), (ScheduleKind::Interleaved{group:None},2), (ScheduleKind::ZbH1,1), (ScheduleKind::ZbV,2), (ScheduleKind::DualPipeV,2), (ScheduleKind::Interleaved{group:None},4)] {
        let s = generate(&ScheduleConfig::new(kind, 4, 8).with_virtual_stages(v)).unwrap();
        let t = if v == 2 {0.5} else {1.0};
        let x = simulate(&s, &Times::uniform(s.stages(), t, t, t, 0.)).unwrap();
        println!("{}", x.table(120));
        let x = simulate(&s, &Times::uniform(s.stages(), t, t, t, 0.2)).unwrap();
        x.write_svg(std::path::Path::new(&format!("/tmp/pipe/{kind}{v}.svg"))).unwrap();
    }
}
