// The flows of one workload on SimGrid's C++ core: what benchmarks/sharing.py compares with.
//
// Two ways of driving it:
//
// kernel  The layer below actors and activities, as SimGrid's own engine drives it: NetworkModel::communicate starts a
//         flow, EngineImpl::solve shares the links and jumps to the next end (or to the next start, if that comes
//         first), extract_done_action gives the flows that have ended.  The least that SimGrid can cost: there is no
//         event loop and nobody to be told.  These are internal interfaces.
// s4u     The public interface, used as sparingly as can be: one actor starts all communications at their times,
//         without waiting for them, and a callback notes each end.
//
// usage: simgrid_core kernel|s4u WORKLOAD FINISH [SimGrid options]
//   WORKLOAD  int64 links, paths, hops, flows; then float64 capacity[links]; int64 hops_of_path[paths], link[hops];
//             float64 start[flows], size[flows]; int64 path[flows]; starts in rising order
//   FINISH    float64 finish[flows], written
// prints the CPU seconds of the simulation itself, without building the platform.

#include <cstdint>
#include <cstdio>
#include <ctime>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "simgrid/s4u.hpp"
#include "src/kernel/EngineImpl.hpp"
#include "src/kernel/resource/NetworkModel.hpp"

namespace sg = simgrid::s4u;

template <class T> static std::vector<T> take(FILE* file, int64_t count)
{
  std::vector<T> values(count);
  if (fread(values.data(), sizeof(T), count, file) != static_cast<size_t>(count))
    throw std::runtime_error("the workload ends too early");
  return values;
}

static double cpu_seconds()
{
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

struct Workload {
  std::vector<double> capacity;
  std::vector<int64_t> hops;
  std::vector<int64_t> links;
  std::vector<double> start;
  std::vector<double> size;
  std::vector<int64_t> path;
};

using Ends = std::vector<std::pair<sg::Host*, sg::Host*>>;

static Workload read_workload(const char* name)
{
  FILE* file = fopen(name, "rb");
  if (file == nullptr)
    throw std::runtime_error(std::string("cannot read ") + name);
  const auto count = take<int64_t>(file, 4);
  Workload work;
  work.capacity = take<double>(file, count[0]);
  work.hops     = take<int64_t>(file, count[1]);
  work.links    = take<int64_t>(file, count[2]);
  work.start    = take<double>(file, count[3]);
  work.size     = take<double>(file, count[3]);
  work.path     = take<int64_t>(file, count[3]);
  fclose(file);
  return work;
}

// The table of routes is quadratic in the hosts, so paths from one memory share a host, unless they would then have both
// ends in common.
static Ends build_platform(sg::NetZone* zone, const Workload& work)
{
  std::vector<const sg::Link*> links;
  for (size_t i = 0; i < work.capacity.size(); i++)
    links.push_back(zone->add_link("l" + std::to_string(i), work.capacity[i])->set_latency(0)->seal());
  std::map<std::string, sg::Host*> hosts;
  auto host = [&](const std::string& name) {
    auto*& h = hosts[name];
    if (h == nullptr)
      h = zone->add_host(name, 1e9)->seal();
    return h;
  };
  Ends ends;
  std::map<std::pair<int64_t, int64_t>, int> seen;
  for (size_t p = 0, at = 0; p < work.hops.size(); at += work.hops[p++]) {
    const int64_t first = work.links[at];
    const int64_t last  = work.links[at + work.hops[p] - 1];
    const int twin      = seen[{first, last}]++;
    const auto suffix   = twin ? "." + std::to_string(twin) : std::string();
    ends.emplace_back(host("s" + std::to_string(first) + suffix), host("d" + std::to_string(last) + suffix));
    std::vector<sg::LinkInRoute> route;
    for (int64_t k = 0; k < work.hops[p]; k++)
      route.emplace_back(links[work.links[at + k]]);
    zone->add_route(ends.back().first, ends.back().second, route, false);
  }
  zone->seal();
  return ends;
}

static double run_kernel(sg::NetZone* zone, const Workload& work, const Ends& ends, std::vector<double>& finish)
{
  auto* kernel  = simgrid::kernel::EngineImpl::get_instance();
  auto* network = zone->get_impl()->get_network_model().get();
  std::unordered_map<simgrid::kernel::resource::Action*, size_t> running;
  const size_t flows = work.start.size();
  size_t next        = 0;
  const double begin = cpu_seconds();
  while (next < flows || not running.empty()) {
    const double now = simgrid::kernel::EngineImpl::get_clock();
    for (; next < flows && work.start[next] <= now * (1 + 1e-14); next++) {
      const auto& [from, to] = ends[work.path[next]];
      running[network->communicate(from, to, work.size[next], -1.0, false)] = next;
    }
    kernel->solve(next < flows ? work.start[next] : -1.0);
    while (auto* action = network->extract_done_action()) {
      const auto it      = running.find(action);
      finish[it->second] = simgrid::kernel::EngineImpl::get_clock();
      running.erase(it);
      action->unref();
    }
  }
  return cpu_seconds() - begin;
}

static double run_s4u(sg::Engine& engine, const Workload& work, const Ends& ends, std::vector<double>& finish)
{
  std::vector<sg::CommPtr> comms;
  comms.reserve(work.start.size());
  engine.get_all_hosts()[0]->add_actor("source", [&] {
    for (size_t i = 0; i < work.start.size(); i++) {
      if (work.start[i] > sg::Engine::get_clock())
        sg::this_actor::sleep_until(work.start[i]);
      const auto& [from, to] = ends[work.path[i]];
      auto comm              = sg::Comm::sendto_init(from, to);
      comm->set_payload_size(static_cast<uint64_t>(work.size[i])); // whole bytes only
      comm->on_this_completion_cb([&finish, i](const sg::Comm&) { finish[i] = sg::Engine::get_clock(); });
      comm->start();
      comms.push_back(comm);
    }
    for (const auto& comm : comms)
      comm->wait();
  });
  const double begin = cpu_seconds();
  engine.run();
  return cpu_seconds() - begin;
}

int main(int argc, char** argv)
{
  sg::Engine engine(&argc, argv);
  if (argc != 4) {
    fprintf(stderr, "usage: %s kernel|s4u WORKLOAD FINISH [SimGrid options]\n", argv[0]);
    return 2;
  }
  const auto work = read_workload(argv[2]);
  auto* zone      = engine.get_netzone_root();
  const auto ends = build_platform(zone, work);
  std::vector<double> finish(work.start.size());
  const bool kernel = std::string(argv[1]) == "kernel";
  printf("%.9f\n", kernel ? run_kernel(zone, work, ends, finish) : run_s4u(engine, work, ends, finish));
  fflush(stdout);
  FILE* out = fopen(argv[3], "wb");
  fwrite(finish.data(), sizeof(double), finish.size(), out);
  fclose(out);
  _Exit(0); // nothing is left to simulate, and tearing the platform down would take longer than the benchmark
}
