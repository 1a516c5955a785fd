// The flows of one workload on SimGrid's C++ core, without actors: what benchmarks/sharing.py compares with.
//
// Actors, mailboxes and activities would add their own cost to every flow.  So this drives the layer below them, as
// SimGrid's own engine does: NetworkModel::communicate starts a flow, EngineImpl::solve shares the links and jumps to
// the next end (or to the next start, if that comes first), extract_done_action gives the flows that have ended.
//
// usage: simgrid_core WORKLOAD FINISH [SimGrid options]
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

int main(int argc, char** argv)
{
  sg::Engine engine(&argc, argv);
  FILE* in = fopen(argv[1], "rb");
  if (in == nullptr)
    throw std::runtime_error(std::string("cannot read ") + argv[1]);
  const auto count    = take<int64_t>(in, 4);
  const auto capacity = take<double>(in, count[0]);
  const auto hops     = take<int64_t>(in, count[1]);
  const auto link_ids = take<int64_t>(in, count[2]);
  const auto start    = take<double>(in, count[3]);
  const auto size     = take<double>(in, count[3]);
  const auto path     = take<int64_t>(in, count[3]);
  fclose(in);

  auto* zone = engine.get_netzone_root();
  std::vector<const sg::Link*> links;
  for (size_t i = 0; i < capacity.size(); i++)
    links.push_back(zone->add_link("l" + std::to_string(i), capacity[i])->set_latency(0)->seal());

  // The table of routes is quadratic in the hosts, so paths from one memory share a host, unless they would then have
  // both ends in common.
  std::map<std::string, sg::Host*> hosts;
  auto host = [&](const std::string& name) {
    auto*& h = hosts[name];
    if (h == nullptr)
      h = zone->add_host(name, 1e9)->seal();
    return h;
  };
  std::vector<std::pair<sg::Host*, sg::Host*>> ends;
  std::map<std::pair<int64_t, int64_t>, int> seen;
  for (size_t p = 0, at = 0; p < hops.size(); at += hops[p++]) {
    const int64_t first = link_ids[at], last = link_ids[at + hops[p] - 1];
    const int twin      = seen[{first, last}]++;
    const auto suffix   = twin ? "." + std::to_string(twin) : "";
    ends.emplace_back(host("s" + std::to_string(first) + suffix), host("d" + std::to_string(last) + suffix));
    std::vector<sg::LinkInRoute> route;
    for (int64_t k = 0; k < hops[p]; k++)
      route.emplace_back(links[link_ids[at + k]]);
    zone->add_route(ends.back().first, ends.back().second, route, false);
  }
  zone->seal();

  auto* kernel  = simgrid::kernel::EngineImpl::get_instance();
  auto* network = zone->get_impl()->get_network_model().get();
  std::vector<double> finish(start.size());
  std::unordered_map<simgrid::kernel::resource::Action*, size_t> running;
  const size_t flows = start.size();
  size_t next        = 0;

  const double begin = cpu_seconds();
  while (next < flows || not running.empty()) {
    const double now = simgrid::kernel::EngineImpl::get_clock();
    for (; next < flows && start[next] <= now * (1 + 1e-14); next++) {
      const auto& [from, to] = ends[path[next]];
      running[network->communicate(from, to, size[next], -1.0, false)] = next;
    }
    kernel->solve(next < flows ? start[next] : -1.0);
    while (auto* action = network->extract_done_action()) {
      const auto it      = running.find(action);
      finish[it->second] = simgrid::kernel::EngineImpl::get_clock();
      running.erase(it);
      action->unref();
    }
  }
  printf("%.9f\n", cpu_seconds() - begin);
  fflush(stdout);

  FILE* out = fopen(argv[2], "wb");
  fwrite(finish.data(), sizeof(double), flows, out);
  fclose(out);
  _Exit(0); // nothing is left to simulate, and tearing the platform down would take longer than the benchmark
}
